FROM python:3.11.14-slim-bookworm AS build
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /src
RUN python -m venv --without-pip /opt/blackbox
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY blackbox ./blackbox
RUN pip wheel --no-deps --wheel-dir dist .
RUN pip --python /opt/blackbox/bin/python install --constraint constraints.txt dist/*.whl

FROM python:3.11.14-slim-bookworm
COPY --from=build /opt/blackbox /opt/blackbox
ENV PATH=/opt/blackbox/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
# A number, so that Kubernetes can see that it is not root.
USER 10001:10001
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=5s --start-period=30s --retries=3 \
    CMD ["python", "-c", "import http.client, os, sys; c = http.client.HTTPConnection('127.0.0.1', int(os.environ.get('BLACKBOX_HTTP_PORT', '8000')), timeout=4); c.request('GET', '/livez'); sys.exit(c.getresponse().status != 200)"]
ENTRYPOINT ["blackbox"]
CMD ["run"]
