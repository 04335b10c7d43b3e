"""Asks the API server, as `helm test` does, whether InferenceServices are known, accepted and refused as they should.

Nothing is stored: every request is a dry run. Arguments: namespace, and `webhook` or `no-webhook`. Uses the pod's own
ServiceAccount and the standard library only. Ends with 0, or with 1 and one line per failed check.
"""

import json
import ssl
import sys
import urllib.error
import urllib.request

ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"
SERVER = "https://kubernetes.default.svc"
API = "/apis/serving.isthmus.dev/v1alpha1"


def service(**spec):
    """A small valid InferenceService with fields of `spec` replaced."""
    return {
        "apiVersion": "serving.isthmus.dev/v1alpha1",
        "kind": "InferenceService",
        "metadata": {"name": "helm-test"},
        "spec": {
            "mode": "Disaggregated",
            "model": {"source": {"pvc": {"claimName": "any"}}},
            "roles": {"prefill": {}, "decode": {}},
            **spec,
        },
    }


def ask(path, body=None, server=SERVER, account=ACCOUNT):
    """Status and decoded answer of one request; a POST where there is a body."""
    with open(f"{account}/token", encoding="ascii") as token:
        headers = {"Authorization": f"Bearer {token.read().strip()}", "Content-Type": "application/json"}
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(server + path, data=data, headers=headers)
    trust = ssl.create_default_context(cafile=f"{account}/ca.crt")
    try:
        with urllib.request.urlopen(request, context=trust, timeout=30) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def checks(namespace, with_webhook):
    """(what, path, body, accepted, text that the answer must hold)"""
    create = f"{API}/namespaces/{namespace}/inferenceservices?dryRun=All"
    yield "the CRD is installed", API, None, True, "inferenceservices"
    yield "a valid service is accepted", create, service(), True, "helm-test"
    yield "the CRD's rules refuse roles that contradict the mode", create, service(mode="Unified"), False, "role worker"
    if with_webhook:
        late = service(rollout={"drainTimeout": "5s"}, transfer={"timeout": "30s"})
        yield "the webhook refuses a drain shorter than a transfer", create, late, False, "spec.rollout.drainTimeout"


def main(namespace, webhook):
    failed = False
    for what, path, body, accepted, text in checks(namespace, webhook == "webhook"):
        try:
            status, answer = ask(path, body)
        except OSError as error:
            status, answer = 0, {"message": str(error)}
        good = (status in (200, 201)) == accepted and text in json.dumps(answer)
        failed = failed or not good
        if good:
            print("ok    ", what)
        else:
            print("FAILED", f"{what}: status {status}: {answer.get('message', answer)}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
