#!/bin/bash
# blackbox with these arguments; as `executor`, the process that Spark asks of an image on Kubernetes.
set -euo pipefail

if [ "${1:-}" != executor ]; then
    exec blackbox "$@"
fi

options=()
while name=SPARK_JAVA_OPT_${#options[@]} && [ -n "${!name+given}" ]; do
    options+=("${!name}")
done

exec java "${options[@]}" \
    "-Xms$SPARK_EXECUTOR_MEMORY" \
    "-Xmx$SPARK_EXECUTOR_MEMORY" \
    -cp "${SPARK_CLASSPATH:+$SPARK_CLASSPATH:}$SPARK_HOME/jars/*" \
    org.apache.spark.scheduler.cluster.k8s.KubernetesExecutorBackend \
    --driver-url "$SPARK_DRIVER_URL" \
    --executor-id "$SPARK_EXECUTOR_ID" \
    --cores "$SPARK_EXECUTOR_CORES" \
    --app-id "$SPARK_APPLICATION_ID" \
    --hostname "$SPARK_EXECUTOR_POD_IP" \
    --resourceProfileId "$SPARK_RESOURCE_PROFILE_ID" \
    --podName "$SPARK_EXECUTOR_POD_NAME"
