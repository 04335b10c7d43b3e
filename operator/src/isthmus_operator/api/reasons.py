"""The fixed set of reasons in conditions and Events, each with its meaning and its remedy.

Programs may rely on the words. `python -m isthmus_operator.api.reasons` prints operator/docs/conditions.md.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from enum import StrEnum


class Reason(StrEnum):
    """Every reason the operator writes."""

    # Good or in progress.
    COMPLETE = "Complete"
    ROLLING_OUT = "RollingOut"
    PAUSED = "Paused"
    ALL_READY = "AllReady"
    SCALED_TO_ZERO = "ScaledToZero"
    EXTERNAL = "External"
    SERVING = "Serving"
    MODEL_LOADED = "ModelLoaded"
    PROBED = "Probed"
    SAME_FINGERPRINT = "SameFingerprint"
    STARTING = "Starting"
    NOT_REPORTED = "NotReported"
    ADAPTERS_LOADED = "AdaptersLoaded"
    # Bad.
    INVALID_SPEC = "InvalidSpec"
    NO_ROUTER = "NoRouter"
    NO_ENGINE = "NoEngine"
    PODS_NOT_CREATED = "PodsNotCreated"
    PODS_NOT_READY = "PodsNotReady"
    UNSCHEDULABLE = "Unschedulable"
    IMAGE_PULL_FAILED = "ImagePullFailed"
    CRASH_LOOPING = "CrashLooping"
    POD_NOT_SET_UP = "PodNotSetUp"
    CONFIG_ERROR = "ContainerConfigError"
    OUT_OF_MEMORY = "OutOfMemory"
    MODEL_FETCH_FAILED = "ModelFetchFailed"
    ANOTHER_TOKENIZER = "AnotherTokenizer"
    DEADLINE_EXCEEDED = "ProgressDeadlineExceeded"
    ROLLED_BACK = "RolledBack"
    NAME_TAKEN = "NameTaken"
    RECONCILE_FAILED = "ReconcileFailed"
    INTERNAL_ERROR = "InternalError"
    OVER_BUDGET = "OverBudget"
    TRANSFER_NOT_READY = "TransferNotReady"
    TRANSPORT_REPLACED = "TransportReplaced"
    FINGERPRINT_MISMATCH = "FingerprintMismatch"
    FOREIGN_PODS = "ForeignPods"
    ADAPTERS_PENDING = "AdaptersPending"
    ADAPTERS_MISSING = "AdaptersMissing"
    # Events only.
    ROLLOUT_STARTED = "RolloutStarted"
    CAPACITY_GAP = "CapacityGap"
    CHILD_HEALED = "ChildHealed"
    CHILD_CONTESTED = "ChildContested"
    CHILD_OVERRIDDEN = "ChildOverridden"
    SCALED = "Scaled"
    OPTIONAL_API_MISSING = "OptionalApiMissing"


@dataclass(frozen=True, slots=True)
class Text:
    """For people: what a reason means, and what to do about it."""

    meaning: str
    remedy: str


_NOTHING = "Nothing."

TEXTS: dict[Reason, Text] = {
    Reason.COMPLETE: Text("All pods run the current spec and are ready.", _NOTHING),
    Reason.ROLLING_OUT: Text("Pods are being started or replaced. The message says what it is waiting for.", "Wait."),
    Reason.PAUSED: Text("`spec.rollout.paused` is true and holds back a change.", "Set it to false."),
    Reason.ALL_READY: Text("All pods of the role are ready.", _NOTHING),
    Reason.SCALED_TO_ZERO: Text("The role is scaled to no pods.", "Scale it up if that is not intended."),
    Reason.EXTERNAL: Text("The Mooncake master is run outside this service and is not monitored.", _NOTHING),
    Reason.SERVING: Text("A router and the engines it needs are ready.", _NOTHING),
    Reason.MODEL_LOADED: Text("At least one engine of the current spec has loaded the model.", _NOTHING),
    Reason.PROBED: Text("Engines have probed their transport and use it.", _NOTHING),
    Reason.SAME_FINGERPRINT: Text("All engines report one KV layout, so any prefill pairs with any decode.", _NOTHING),
    Reason.STARTING: Text("Pods run but are not ready yet, within `spec.availability.startupTimeout`.", "Wait."),
    Reason.NOT_REPORTED: Text(
        "No engine has answered `/info` to the operator.",
        "Wait for engines to start. If they are ready, check whether a NetworkPolicy keeps the operator from"
        " port 8001.",
    ),
    Reason.INVALID_SPEC: Text(
        "The spec breaks a rule, or asks for what the chart's `security.profile` refuses, and was admitted because the"
        " webhook is off or that profile was chosen later. Pods stay as they were, and nothing is restored.",
        "Correct the fields the message names.",
    ),
    Reason.NO_ROUTER: Text("No router is ready, so clients get no answer.", "See the condition RouterReady."),
    Reason.NO_ENGINE: Text(
        "No engine that could answer a prompt is ready.", "See the conditions PrefillReady, DecodeReady, WorkerReady."
    ),
    Reason.PODS_NOT_CREATED: Text(
        "Kubernetes refuses to create pods.",
        "The message is the API server's: raise the quota, or correct `podPatch` or what an admission policy forbids.",
    ),
    Reason.PODS_NOT_READY: Text(
        "Pods are not ready for another reason, or were ready and no longer are: the engine does not answer"
        " `/ready`, or its node is gone.",
        "Run `kubectl describe` on the pod named, and read its log.",
    ),
    Reason.UNSCHEDULABLE: Text(
        "No node has room for a pod.",
        "Free or add the resource that the message names, or change resources, nodeSelector or tolerations.",
    ),
    Reason.IMAGE_PULL_FAILED: Text(
        "An image cannot be pulled.", "Correct the image, or set `spec.engine.imagePullSecrets`."
    ),
    Reason.CRASH_LOOPING: Text(
        "A container keeps exiting.", "Run `kubectl logs --previous` on the pod and container named."
    ),
    Reason.POD_NOT_SET_UP: Text(
        "A pod was assigned to a node a minute ago, and its volumes or network are still not set up.",
        "Run `kubectl describe` on the pod named: a claim, Secret or ConfigMap is missing, or a volume or the network"
        " fails.",
    ),
    Reason.CONFIG_ERROR: Text(
        "A container cannot be created, mostly because a Secret or one of its keys is missing.", "Create what is named."
    ),
    Reason.OUT_OF_MEMORY: Text(
        "A container was killed for using more memory than its limit.",
        "Raise the memory limit, or lower `kvCache.memory` or `store.segmentSize`.",
    ),
    Reason.MODEL_FETCH_FAILED: Text(
        "The model cannot be downloaded.",
        "Run `kubectl logs POD -c model-fetch`; correct the source, its credentials or the network.",
    ),
    Reason.ANOTHER_TOKENIZER: Text(
        "Routers give an engine nothing, as its model has another tokenizer than theirs: a branch has moved, or files"
        " were changed in place, since they started. A rollout takes no old engine away for it.",
        "Name another revision (best a commit) or place in `spec.model.source`, which replaces engines and routers in"
        " step; or restart the routers, which then know the new engines alone.",
    ),
    Reason.DEADLINE_EXCEEDED: Text(
        "A new pod, or the master, was not ready within `spec.rollout.progressDeadline`. Old pods go on serving.",
        "Correct the spec, or revert it; either goes on from where the rollout stands.",
    ),
    Reason.ROLLED_BACK: Text(
        "A rollout failed and `spec.rollout.onFailure: Rollback` brought back the previous revision.",
        "Correct the spec; the failed one is not tried again.",
    ),
    Reason.NAME_TAKEN: Text(
        "An object that is not the service's has a name that the service needs. It is left alone, nothing new is"
        " created meanwhile, and existing objects keep running.",
        "Rename or delete the object named, or rename the InferenceService. The service goes on within a minute.",
    ),
    Reason.RECONCILE_FAILED: Text(
        "The API server refused an object; the operator retries with growing pauses. Existing objects"
        " keep running; unless the object is optional, nothing new is created meanwhile.",
        "The message is the API server's. Common causes: a wrong field in `podPatch`, a quota, a missing right of the"
        " operator, or a webhook or policy that refuses.",
    ),
    Reason.INTERNAL_ERROR: Text(
        "The operator failed while working on this spec, which is a defect. The service is left as it was; the operator"
        " retries with growing pauses, and other services are not affected.",
        "Undo the last edit of the spec, and report the message with the operator's log, which has the traceback.",
    ),
    Reason.OVER_BUDGET: Text(
        "Working out what the spec asks for takes longer than a service may have, or the services of the namespace say"
        " more than the operator keeps of one. The service is left as it was; other services are not affected.",
        "Make the spec smaller, most likely a `podPatch`. Of a spec that takes long report it: sizes that are admitted"
        " should not. Where a namespace has no more room, delete services, or use another one.",
    ),
    Reason.TRANSFER_NOT_READY: Text("An engine cannot move KV.", "The message is the engine's own."),
    Reason.TRANSPORT_REPLACED: Text(
        "Engines use a transport other than the one `spec.transfer.transport` names.",
        "See the engine's log; RDMA needs devices (`spec.transfer.rdma`), NVLink one node.",
    ),
    Reason.FINGERPRINT_MISMATCH: Text(
        "Prefill and decode report different KV layouts, so they are not paired.",
        "During a rollout: wait. Otherwise compare the pods' `/info`; `podPatch` must not change engine arguments.",
    ),
    Reason.FOREIGN_PODS: Text(
        "Pods have the labels of the service and were not made by it, such as those of a copied Deployment. They are"
        " not counted; Services find pods by labels, so requests may go to them.",
        "Remove the labels `serving.isthmus.dev/*` from whatever creates the pods named, or delete it.",
    ),
    Reason.ADAPTERS_LOADED: Text("All engines have the adapters that the spec lists.", _NOTHING),
    Reason.ADAPTERS_PENDING: Text(
        "Engines have not read the present list of adapters. Kubelets bring a changed one within two minutes or so.",
        "Wait.",
    ),
    Reason.ADAPTERS_MISSING: Text(
        "Engines could not load adapters, and try again. An adapter that was to be replaced is served as it was.",
        'Put right what the message says of the adapter: its folder, its rank (`extraArgs: {max-lora-rank: "64"}`),'
        " what it adapts.",
    ),
    Reason.ROLLOUT_STARTED: Text("The spec asks for pods other than those that exist.", _NOTHING),
    Reason.CAPACITY_GAP: Text(
        "A role of one pod is replaced without a surge: it has no pod until the new one is ready.",
        "If that matters, run two pods, or make room for one more and set `maxSurge: 1`; for the only router, another"
        " strategy than `Recreate` does.",
    ),
    Reason.CHILD_HEALED: Text(
        "An object of the service was changed or deleted by somebody else and has been restored.",
        "Change the InferenceService instead.",
    ),
    Reason.CHILD_CONTESTED: Text(
        "Somebody else keeps changing an object of the service. It is restored after pauses of 15 s to 5 min.",
        "Stop the other writer: `kubectl get KIND NAME -o yaml --show-managed-fields` names it. An HPA or KEDA belongs"
        " on the RoleScaler of a role with scaling `External`, not on a Deployment.",
    ),
    Reason.CHILD_OVERRIDDEN: Text(
        "An object of the service differs from what the operator wrote, because an admission policy or webhook changes"
        " it. It is left as it is.",
        "Nothing, if that is intended. Otherwise exempt objects with the label `serving.isthmus.dev/service` from the"
        " policy.",
    ),
    Reason.SCALED: Text(
        "Autoscaling has changed the number of pods of a role. The message says what decided it: the role's target or"
        " `spec.scalingPolicy.ratio`.",
        _NOTHING,
    ),
    Reason.OPTIONAL_API_MISSING: Text(
        "An optional object was left out because its API is not installed. `status.skipped` lists its kind meanwhile.",
        "Install the API (it is noticed within minutes), or turn the setting off.",
    ),
}

CONDITIONS = (
    ("Ready", "Everything the current spec asks for exists and is ready. This is the condition to wait for."),
    ("Available", "Clients get answers, if only from pods of an older spec or from fewer pods than asked for."),
    (
        "Progressing",
        "True while the rollout is moving or complete; False when it has failed or an object is refused; Unknown while"
        " paused.",
    ),
    ("ModelReady", "An engine of the current spec has loaded the model."),
    ("PrefillReady, DecodeReady, WorkerReady, RouterReady", "All pods of the role run the current spec and are ready."),
    ("StoreReady", "The Mooncake master is ready. Only with a store."),
    ("AdaptersReady", "All engines that answer have the adapters that the spec lists. Only with adapters."),
    ("TransferReady", "KV can move, over the transport the message names. Only with mode Disaggregated."),
    ("Compatible", "The spec is valid, engines agree on one KV layout, and no foreign pod has the service's labels."),
)

EVENTS = (
    Reason.ROLLOUT_STARTED, Reason.COMPLETE, Reason.DEADLINE_EXCEEDED, Reason.ROLLED_BACK, Reason.CAPACITY_GAP,
    Reason.SERVING, Reason.NO_ROUTER, Reason.NO_ENGINE, Reason.INVALID_SPEC, Reason.FINGERPRINT_MISMATCH,
    Reason.TRANSFER_NOT_READY, Reason.TRANSPORT_REPLACED, Reason.CHILD_HEALED, Reason.CHILD_CONTESTED,
    Reason.CHILD_OVERRIDDEN,
    Reason.SCALED, Reason.OPTIONAL_API_MISSING, Reason.RECONCILE_FAILED, Reason.NAME_TAKEN,
    Reason.INTERNAL_ERROR, Reason.OVER_BUDGET, Reason.FOREIGN_PODS,
    Reason.ADAPTERS_MISSING,
)  # fmt: skip
"""Reasons that also come as Events, when they begin to hold."""


def document() -> str:
    """The text of operator/docs/conditions.md."""
    lines = [
        "# Conditions, reasons and Events",
        "",
        "Generated by `python -m isthmus_operator.api.reasons`.",
        "",
        "All conditions are positive: True is good. `kubectl isthmus explain NAME` prints the one cause that blocks.",
        "",
        "| Condition | True means |",
        "|---|---|",
        *(f"| {name} | {meaning} |" for name, meaning in CONDITIONS),
        "",
        "## Reasons",
        "",
        "*Event*: also written as an Event, once, when it begins to hold.",
        "",
        "| Reason | Event | Means | Remedy |",
        "|---|---|---|---|",
        *(
            f"| {reason.value} | {'yes' if reason in EVENTS else ''} | {text.meaning} | {text.remedy} |"
            for reason, text in TEXTS.items()
        ),
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(document())
