"""Resources that are written to stop the operator, with its webhook off: others are looked after all the same."""

from pathlib import Path

from operator_world import Service, roles, until

GROUP = "serving.isthmus.dev/v1alpha1"
MODEL = '{"source": {"pvc": {"claimName": "m"}}}'
DEEP = 9_000
"""Of the 10,000 levels that the API server takes, and the 1,000 that Python's json does by itself."""


def test_a_spec_that_is_nested_too_deep_or_too_large_stops_nobody(service: Service, tmp_path: Path) -> None:
    path = f"/apis/{GROUP}/namespaces/{service.namespace}/inferenceservices"
    bombs = {
        "deep": '{"spec": ' + '{"a":' * DEEP + "1" + "}" * DEEP + "}",
        "large": '{"spec": {"volumes": [' + ",".join(f'{{"name": "v{i}"}}' for i in range(60_000)) + "]}}",
    }
    for name, patch in bombs.items():
        spec = f'{{"mode": "Unified", "model": {MODEL}, "roles": {{"worker": {{"podPatch": {patch}}}}}}}'
        text = (
            f'{{"apiVersion": "{GROUP}", "kind": "InferenceService", "metadata": {{"name": "{name}"}}, "spec": {spec}}}'
        )
        (tmp_path / name).write_text(text)
        service.cluster.kubectl("create", "--raw", path, "-f", str(tmp_path / name))

    def compatible(name: str) -> str:
        query = "jsonpath={.status.conditions[?(@.type=='Compatible')].message}"
        return service.cluster.kubectl("get", "pdsvc", name, "-n", service.namespace, "-o", query)

    until(lambda: "too deep" in compatible("deep"), 30, lambda: compatible("deep"))
    until(lambda: "more than 256 items" in compatible("large"), 30, lambda: compatible("large"))
    service.apply()
    service.ready()
    # While they are there, and change.
    service.cluster.kubectl("label", "pdsvc", "deep", "large", "-n", service.namespace, "a=b")
    service.apply(roles=roles(2, 1))
    service.ready()
