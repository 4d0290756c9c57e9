FROM python:3.11.14-slim-bookworm AS build
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /src
RUN python -m venv --without-pip /opt/blackbox
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY blackbox ./blackbox
RUN pip wheel --no-deps --wheel-dir dist .
RUN pip --python /opt/blackbox/bin/python install --constraint constraints.txt "$(echo dist/*.whl)[spark]"
RUN /opt/blackbox/bin/python -m blackbox.spark.compiled_modules

FROM python:3.11.14-slim-bookworm
# Hadoop, inside Spark, ends when the user has no name.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends openjdk-17-jre-headless \
    && rm -rf /var/lib/apt/lists/* \
    && groupadd --gid 10001 blackbox \
    && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /tmp --shell /usr/sbin/nologin blackbox
COPY --from=build /opt/blackbox /opt/blackbox
COPY docker-entrypoint.sh /usr/local/bin/
ENV PATH=/opt/blackbox/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
ENV SPARK_HOME=/opt/blackbox/lib/python3.11/site-packages/pyspark
# The one folder that Spark writes to; executors put what the driver sends where they are started.
WORKDIR /tmp
# A number, so that Kubernetes can see that it is not root.
USER 10001:10001
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=5s --start-period=30s --retries=3 \
    CMD ["python", "-c", "import http.client, os, sys; c = http.client.HTTPConnection('127.0.0.1', int(os.environ.get('BLACKBOX_HTTP_PORT', '8000')), timeout=4); c.request('GET', '/livez'); sys.exit(c.getresponse().status != 200)"]
ENTRYPOINT ["docker-entrypoint.sh"]
CMD ["run"]
