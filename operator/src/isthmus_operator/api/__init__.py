"""The InferenceService API: types, defaults and validation, and the CRD generated from them.

Used by every other part of the operator. Pure: no Kubernetes client, no kopf, no I/O.
A field that is not declared here does not exist.
"""
