{{- define "blackbox.sparkFolder" -}}/etc/blackbox/spark{{- end -}}

{{- define "blackbox.isSpark" -}}
{{- if eq .Values.config.engine "spark" -}}true{{- end -}}
{{- end -}}

{{/* Executors are elsewhere and connect back to the driver. */}}
{{- define "blackbox.isCluster" -}}
{{- if and (include "blackbox.isSpark" .) (not (hasPrefix "local" .Values.config.sparkMaster)) -}}true{{- end -}}
{{- end -}}

{{- define "blackbox.isKubernetes" -}}
{{- if and (include "blackbox.isSpark" .) (hasPrefix "k8s://" .Values.config.sparkMaster) -}}true{{- end -}}
{{- end -}}

{{/* The chart makes the file that BLACKBOX_SPARK_CONFIG names. */}}
{{- define "blackbox.hasSparkFile" -}}
{{- if and (include "blackbox.isSpark" .) (not .Values.config.sparkConfig) (or (include "blackbox.isCluster" .) .Values.sparkProperties) -}}true{{- end -}}
{{- end -}}

{{- define "blackbox.sparkName" -}}
{{- printf "%s-spark" (include "blackbox.fullname" . | trunc 57 | trimSuffix "-") -}}
{{- end -}}

{{- define "blackbox.driverName" -}}
{{- printf "%s-driver" (include "blackbox.fullname" . | trunc 56 | trimSuffix "-") -}}
{{- end -}}

{{/* Of the chart's executors, so that network policies can tell them from those of other releases. */}}
{{- define "blackbox.executorLabels" -}}
app.kubernetes.io/name: {{ printf "%s-executor" (include "blackbox.name" . | trunc 54 | trimSuffix "-") }}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end -}}

{{/* Empty where strangers need no secret to talk to the driver. What config.sparkConfig says is not known. */}}
{{- define "blackbox.isAuthenticated" -}}
{{- $default := not (empty (include "blackbox.isKubernetes" .)) -}}
{{- if eq (dig "spark.authenticate" $default .Values.sparkProperties | toString | lower) "true" -}}true{{- end -}}
{{- end -}}

{{- define "blackbox.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end -}}

{{/* Fails where Spark could not work as asked. */}}
{{- define "blackbox.checkSpark" -}}
{{- range $name, $_ := .Values.sparkProperties -}}
{{- if or (eq $name "spark.master") (not (regexMatch "^spark\\.[^\\s=:]+$" $name)) -}}
{{- fail (printf "sparkProperties has %s; give names that start with spark., and the master as config.sparkMaster" $name) -}}
{{- end -}}
{{- end -}}
{{- if hasKey .Values.sparkProperties "spark.authenticate.secret" -}}
{{- fail "sparkProperties has spark.authenticate.secret, which would be in a ConfigMap and in the process list; give it in spark-defaults.conf from a Secret, mounted with extraVolumes and extraVolumeMounts" -}}
{{- end -}}
{{- if and .Values.config.sparkConfig .Values.sparkProperties -}}
{{- fail "config.sparkConfig and sparkProperties are both set; keep one" -}}
{{- end -}}
{{- if and (include "blackbox.isCluster" .) (gt (int .Values.replicas) 1) -}}
{{- fail (printf "replicas is %d with config.sparkMaster %s: executors would not know which driver is theirs; keep one replica, and raise spark.executor.instances in sparkProperties" (int .Values.replicas) .Values.config.sparkMaster) -}}
{{- end -}}
{{- $isGuarded := and .Values.networkPolicy.enabled (or (include "blackbox.isKubernetes" .) .Values.networkPolicy.executors) -}}
{{- if and (include "blackbox.hasSparkFile" .) (include "blackbox.isCluster" .) (not (include "blackbox.isAuthenticated" .)) (not $isGuarded) -}}
{{- $authenticate := hasKey .Values.sparkProperties "spark.authenticate" | ternary (get .Values.sparkProperties "spark.authenticate" | toString | quote) "not set" -}}
{{- $policy := .Values.networkPolicy.enabled | ternary "networkPolicy.executors is empty" "networkPolicy.enabled is false" -}}
{{- $remedy := "where the cluster has a secret, or let networkPolicy.enabled be true and give in networkPolicy.executors where its executors are" -}}
{{- if include "blackbox.isKubernetes" . -}}
{{- $remedy = "or let networkPolicy.enabled be true" -}}
{{- end -}}
{{- fail (printf "config.sparkMaster is %s, sparkProperties spark.authenticate is %s and %s, so anyone who reaches the driver can make it run code; give spark.authenticate: \"true\" %s" .Values.config.sparkMaster $authenticate $policy $remedy) -}}
{{- end -}}
{{- if and (include "blackbox.isKubernetes" .) (eq (include "blackbox.serviceAccountName" .) "default") -}}
{{- fail "config.sparkMaster is k8s://…, so the pod may create pods, which the service account \"default\" should not; let serviceAccount.create be true, or give serviceAccount.name" -}}
{{- end -}}
{{- end -}}

{{/* One line per setting of Spark; sparkProperties win. */}}
{{- define "blackbox.sparkProperties" -}}
{{- $all := dict -}}
{{- if include "blackbox.isCluster" . -}}
{{- $all = mergeOverwrite $all (dict
  "spark.driver.host" (printf "%s.%s.svc" (include "blackbox.driverName" .) .Release.Namespace)
  "spark.driver.bindAddress" "0.0.0.0"
  "spark.driver.port" .Values.sparkDriver.port
  "spark.blockManager.port" .Values.sparkDriver.blockManagerPort
) -}}
{{- end -}}
{{- if include "blackbox.isKubernetes" . -}}
{{- range $name, $value := include "blackbox.executorLabels" . | fromYaml -}}
{{- $_ := set $all (printf "spark.kubernetes.executor.label.%s" $name) $value -}}
{{- end -}}
{{- $all = mergeOverwrite $all (dict
  "spark.kubernetes.namespace" .Release.Namespace
  "spark.kubernetes.container.image" (include "blackbox.image" .)
  "spark.kubernetes.container.image.pullPolicy" .Values.image.pullPolicy
  "spark.kubernetes.driver.pod.name" "${env:POD_NAME}"
  "spark.kubernetes.executor.podTemplateFile" (printf "%s/executor.yaml" (include "blackbox.sparkFolder" .))
  "spark.kubernetes.executor.disableConfigMap" "true"
  "spark.kubernetes.driver.service.deleteOnTermination" "false"
  "spark.kubernetes.driver.ownPersistentVolumeClaim" "false"
  "spark.kubernetes.driver.reusePersistentVolumeClaim" "false"
  "spark.authenticate" "true"
  "spark.network.crypto.enabled" "true"
  "spark.executor.instances" "2"
  "spark.executor.cores" "2"
  "spark.executor.memory" "1g"
  "spark.executor.memoryOverhead" "1g"
) -}}
{{- end -}}
{{- range $name, $value := mergeOverwrite $all .Values.sparkProperties }}
{{ $name }}={{ kindIs "float64" $value | ternary (int64 $value | toString) (toString $value) | replace "\\" "\\\\" }}
{{- end -}}
{{- end -}}

{{/* Where librdkafka and Redis' client find their certificates: in the pod and in each executor. */}}
{{- define "blackbox.mounts" -}}
- name: tmp
  mountPath: /tmp
{{- if .Values.kafkaConfigSecret.name }}
- name: kafka-config
  mountPath: {{ include "blackbox.kafkaFolder" . }}
  readOnly: true
{{- end }}
{{- if .Values.callersConfigMap.name }}
- name: callers
  mountPath: {{ include "blackbox.callersFolder" . }}
  readOnly: true
{{- end }}
{{- with .Values.extraVolumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "blackbox.volumes" -}}
- name: tmp
  emptyDir: {}
{{- if .Values.kafkaConfigSecret.name }}
- name: kafka-config
  secret:
    secretName: {{ .Values.kafkaConfigSecret.name }}
{{- end }}
{{- if .Values.callersConfigMap.name }}
- name: callers
  configMap:
    name: {{ .Values.callersConfigMap.name }}
{{- end }}
{{- with .Values.extraVolumes }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "blackbox.podSecurity" -}}
runAsNonRoot: true
seccompProfile:
  type: RuntimeDefault
{{- end -}}

{{- define "blackbox.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end -}}

{{/* What Spark makes its executors from. */}}
{{- define "blackbox.executor" -}}
apiVersion: v1
kind: Pod
spec:
  automountServiceAccountToken: false
  enableServiceLinks: false
  securityContext:
    {{- include "blackbox.podSecurity" . | nindent 4 }}
  {{- with .Values.imagePullSecrets }}
  imagePullSecrets:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .Values.priorityClassName }}
  priorityClassName: {{ . }}
  {{- end }}
  containers:
    - name: executor
      securityContext:
        {{- include "blackbox.containerSecurity" . | nindent 8 }}
      volumeMounts:
        {{- include "blackbox.mounts" . | trim | nindent 8 }}
  volumes:
    {{- include "blackbox.volumes" . | trim | nindent 4 }}
  {{- with .Values.nodeSelector }}
  nodeSelector:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .Values.tolerations }}
  tolerations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
{{- end -}}

{{- define "blackbox.resources" -}}
{{- if .Values.resources -}}
{{- toYaml .Values.resources -}}
{{- else if include "blackbox.isSpark" . -}}
requests:
  cpu: 500m
  memory: 2Gi
{{- else -}}
requests:
  cpu: 100m
  memory: 256Mi
{{- end -}}
{{- end -}}
