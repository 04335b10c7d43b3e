{{/* A name of at most 63 characters: longer ones are cut and made unique by a hash. */}}
{{- define "isthmus.cut" -}}
{{- if gt (len .) 63 -}}
{{- printf "%s-%s" (trunc 54 . | trimSuffix "-") (sha256sum . | trunc 8) -}}
{{- else -}}
{{- . -}}
{{- end -}}
{{- end -}}

{{/* The first part of all names. A Service's must begin with a letter and hold no dot; a release's need not. */}}
{{- define "isthmus.base" -}}
{{- $release := replace "." "-" .Release.Name -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride -}}
{{- else if not (regexMatch "^[a-z]" $release) -}}
{{- printf "%s-%s" .Chart.Name $release -}}
{{- else if contains .Chart.Name $release -}}
{{- $release -}}
{{- else -}}
{{- printf "%s-%s" $release .Chart.Name -}}
{{- end -}}
{{- end -}}

{{/* Name of an object in the release's namespace: (list $ "part"). */}}
{{- define "isthmus.name" -}}
{{- include "isthmus.cut" (printf "%s-%s" (include "isthmus.base" (index . 0)) (index . 1)) -}}
{{- end -}}

{{/* Name of an object of the cluster: two releases of one name in two namespaces must not meet. */}}
{{- define "isthmus.clusterName" -}}
{{- $ := index . 0 -}}
{{- include "isthmus.cut" (printf "%s-%s-%s" (include "isthmus.base" $) $.Release.Namespace (index . 1)) -}}
{{- end -}}

{{/* Namespaces to look after with scope namespace, as a JSON array. */}}
{{- define "isthmus.namespaces" -}}
{{- .Values.watch.namespaces | default (list .Release.Namespace) | toJson -}}
{{- end -}}

{{/* Selector of those namespaces. */}}
{{- define "isthmus.namespaceSelector" -}}
matchExpressions:
  - key: kubernetes.io/metadata.name
    operator: In
    values: {{ include "isthmus.namespaces" . }}
{{- end -}}

{{/* What selects the operator's pods. It must never change: selectors of a Deployment are immutable. */}}
{{- define "isthmus.selector" -}}
app.kubernetes.io/name: isthmus-operator
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{/* Labels of every object. The schema keeps the user's from taking the chart's names. */}}
{{- define "isthmus.labels" -}}
{{- $own := include "isthmus.selector" . | fromYaml -}}
{{- $_ := set $own "app.kubernetes.io/version" .Chart.AppVersion -}}
{{- $_ := set $own "app.kubernetes.io/part-of" "isthmus" -}}
{{- $_ := set $own "app.kubernetes.io/managed-by" .Release.Service -}}
{{- $_ := set $own "helm.sh/chart" (printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" | trunc 63) -}}
{{- merge $own .Values.commonLabels | toYaml -}}
{{- end -}}

{{/* Reference of an image: (list $ "operator"). */}}
{{- define "isthmus.image" -}}
{{- $ := index . 0 -}}
{{- $image := index $.Values.images (index . 1) -}}
{{- with $.Values.images.registry -}}{{ trimSuffix "/" . }}/{{- end -}}
{{- $image.repository -}}
{{- if $image.digest -}}@{{ $image.digest }}{{- else -}}:{{ $image.tag | default $.Chart.AppVersion }}{{- end -}}
{{- end -}}

{{- define "isthmus.serviceAccount" -}}
{{- if .Values.serviceAccount.create -}}
{{- .Values.serviceAccount.name | default (include "isthmus.name" (list . "operator")) -}}
{{- else -}}
{{- .Values.serviceAccount.name | default "default" -}}
{{- end -}}
{{- end -}}

{{/* Secret with the webhook's certificate. Each source has its own, so that a change of source never finds the other's. */}}
{{- define "isthmus.certificateSecret" -}}
{{- $certificate := .Values.webhook.certificate -}}
{{- if eq $certificate.source "secret" -}}
{{- required "webhook.certificate.secretName is empty; with source secret, name a Secret of type kubernetes.io/tls" $certificate.secretName -}}
{{- else if eq $certificate.source "cert-manager" -}}
{{- include "isthmus.name" (list . "webhook-issued") -}}
{{- else -}}
{{- include "isthmus.name" (list . "webhook-generated") -}}
{{- end -}}
{{- end -}}

{{/* Security of every container: Pod Security "restricted", and nothing to write to but mounted volumes. */}}
{{- define "isthmus.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end -}}

{{- define "isthmus.podSecurity" -}}
runAsNonRoot: true
{{- with .Values.operator.runAsUser }}
runAsUser: {{ int64 . }}
{{- end }}
{{- with .Values.operator.runAsGroup }}
runAsGroup: {{ int64 . }}
fsGroup: {{ int64 . }}
{{- end }}
seccompProfile:
  type: RuntimeDefault
{{- end -}}

{{/*
What the operator may do with InferenceServices and their children, in a Role or a ClusterRole: RULES of the operator's
rbac.py. Server-side apply needs patch, and create for what is not there yet. tests/charts compares this with rbac.py, and
with the calls in an audit log.
*/}}
{{- define "isthmus.rules" -}}
- apiGroups: [serving.isthmus.dev]
  resources: [inferenceservices]
  verbs: [list, watch]
- apiGroups: [serving.isthmus.dev]
  resources: [inferenceservices/status, rolescalers/status]
  verbs: [patch]
- apiGroups: [serving.isthmus.dev]
  resources: [rolescalers]
  verbs: [list, watch, create, patch, delete]
- apiGroups: [apps]
  resources: [deployments, statefulsets]
  verbs: [list, watch, create, patch, delete]
- apiGroups: [""]
  resources: [services]
  verbs: [list, watch, create, patch, delete]
- apiGroups: [""]
  resources: [configmaps]
  verbs: [list, watch, create, patch, delete]
- apiGroups: [""]
  resources: [pods]
  verbs: [list, watch]
- apiGroups: [""]
  resources: [events]
  verbs: [create]
- apiGroups: [networking.k8s.io]
  resources: [networkpolicies]
  verbs: [list, watch, create, patch, delete]
- apiGroups: [policy]
  resources: [poddisruptionbudgets]
  verbs: [list, watch, create, patch, delete]
# Optional APIs: a right to what is not installed does no harm, and works once it is. These are read, not watched.
- apiGroups: [monitoring.coreos.com]
  resources: [podmonitors]
  verbs: [get, create, patch, delete]
- apiGroups: [gateway.networking.k8s.io]
  resources: [httproutes]
  verbs: [get, create, patch, delete]
{{- end -}}
