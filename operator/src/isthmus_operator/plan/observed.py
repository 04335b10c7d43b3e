"""What exists in the cluster for one service, as plain records. Made by `observe`, read by `plan` and `status`.

Times are seconds since the epoch. Nothing here knows Kubernetes objects or clients.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum

from ..render.names import Component, is_engine

UNSCHEDULABLE = "Unschedulable"
"""Reason of a pod for which the scheduler finds no node."""

REFUSED = "AnotherTokenizer"
"""Reason of a pod to which routers give nothing."""

SICK_AFTER_S = 30.0
"""A pod that ran and is unready for less than this is having a moment; after that it is sick."""


def printable(text: str) -> str:
    """A text of a pod as a terminal and the API server take it: without escape sequences, and without halves of
    surrogate pairs, which the server stores as something else, so that a status with one would be written for ever."""
    return "".join(one if one.isprintable() or one == "\n" else "?" for one in text)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pod:
    """One pod.

    started:     the main container has passed its startup probe, or the pod was ready, since it was last started
    changed:     when readiness last changed; for a pod that never was ready, when it was made
    set_up:      its volumes and its network are there, or nobody says that they are not
    ends:        by when a stopping pod will have been killed; None while it is not stopping
    reason:      CamelCase word for why it is not ready (CrashLoopBackOff, ErrImagePull, Unschedulable, ...)
    problem:     the same for people, naming the container
    restarts:    how often its containers were started anew
    ran:         for how long the last that ended had run; 0: none has, or nobody says
    guarded:     it has credentials and asks for them; its metrics and probes are on a port of their own
    failed:      it will not recover by itself (evicted, or its containers have ended for good)
    """

    name: str
    component: Component
    revision: str
    created: float
    changed: float
    ip: str = ""
    uid: str = ""
    ready: bool = False
    started: bool = False
    set_up: bool = True
    ends: float | None = None
    reason: str = ""
    problem: str = ""
    restarts: int = 0
    ran: float = 0.0
    guarded: bool = False
    failed: bool = False

    def flickers(self, now: float) -> bool:
        """Whether it is unready for so short a time that it is most likely well: a probe that timed out under load, a
        kubelet that was restarted, a node that the control plane did not reach."""
        return self.started and not self.ready and now - self.changed < SICK_AFTER_S

    def settles(self, now: float) -> bool:
        """Whether it crashed, and has been ready again for so short a time that it may do so again."""
        return self.ready and self.restarts > 0 and now - self.changed < SICK_AFTER_S


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A Deployment or StatefulSet with its pods.

    replicas:  what its spec asks for
    pairing:   engines of one value are sure to have one KV layout
    model:     routers and engines of one value know one model; empty: an earlier operator made it
    pooled:    its engines use the store that this service manages
    pairs:     its routers pair prefill with decode
    problem:   why its pods cannot be made (quota, admission); empty when they can
    problem_since: since when pods that it asks for are missing, for whatever reason; 0: none is, or nobody knows
    image:     of its main container
    exact:     its template and all its pods carry the uid of their service
    live:      pods that are not stopping
    """

    name: str
    component: Component
    revision: str
    replicas: int
    created: float
    pairing: str = ""
    model: str = ""
    pooled: bool = False
    pairs: bool = False
    problem: str = ""
    problem_since: float = 0.0
    image: str = ""
    exact: bool = True
    pods: tuple[Pod, ...] = ()
    live: tuple[Pod, ...] = field(init=False, repr=False, compare=False)
    _ready: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # Once: each decision asks dozens of times, of thousands of pods.
        object.__setattr__(self, "live", tuple(pod for pod in self.pods if pod.ends is None and not pod.failed))
        object.__setattr__(self, "_ready", sum(pod.ready for pod in self.live))

    @property
    def ready(self) -> int:
        """Pods that are ready and will stay: a controller that still has to remove some may take ready ones."""
        return min(self.replicas, self._ready)

    def well(self, now: float) -> int:
        """Pods that are ready or flicker and will stay: a controller that has to remove some takes unready ones first,
        whichever they are."""
        if self._ready >= self.replicas:
            return self.replicas
        flickering = sum(pod.flickers(now) for pod in self.live)
        surplus = max(0, len(self.live) - self.replicas)
        return min(self.replicas, self._ready + max(0, flickering - surplus))

    def settled(self, now: float) -> Workload:
        """With pods that crashed and have just become ready again as those that flicker: they serve, and nothing
        follows from it yet."""
        if not any(pod.settles(now) for pod in self.live):
            return self
        text = f"it was restarted, and counts once it has been ready for {SICK_AFTER_S:.0f} s"
        unsure = (replace(pod, ready=False, problem=text) if pod.settles(now) else pod for pod in self.pods)
        return replace(self, pods=tuple(unsure))

    @property
    def fresh(self) -> Workload:
        """Without pods of another revision, which the one workload of a store has while it changes, as has one of
        routers that earlier operators made."""
        return replace(self, pods=tuple(pod for pod in self.pods if pod.revision == self.revision))


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """What an engine says about itself at /info.

    model_revision: commit or digest that its weights were resolved to; empty where it does not say
    adapter_list:   digest of the list of adapters that it follows; empty where it follows none
    adapter_problems: (adapter, why it is not as the list says); an empty name is about the list itself
    queued, kv_usage: requests that wait, share of the KV blocks that are in use; None: it was not asked, or did not say
    stale:          it did not answer this time; this is what it said before
    """

    fingerprint: str
    model: str = ""
    model_revision: str = ""
    transfer_mode: str = ""
    transport: str = ""
    probed_gbps: float = 0.0
    transfer_ready: bool = True
    transfer_reason: str = ""
    physical_blocks: int = 0
    usable_blocks: int = 0
    bytes_per_block: int = 0
    max_model_len: int = 0
    queued: float | None = None
    kv_usage: float | None = None
    adapter_list: str = ""
    adapter_problems: tuple[tuple[str, str], ...] = ()
    stale: bool = False


class Word(Enum):
    """What a router says of an engine. OTHER: that it will never give it requests, as it has another tokenizer."""

    TAKEN = "taken"
    NOT_NOW = "not now"
    OTHER = "another tokenizer"


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Answers of the pods. A pod that has not answered is absent.

    engines: pod name -> what it says
    routers: revision of routers -> what one of them says of each address that it knows
    """

    engines: dict[str, EngineFacts] = field(default_factory=dict)
    routers: dict[str, dict[str, Word]] = field(default_factory=dict)

    def taken(self, address: str) -> bool:
        """Whether a router gives requests to the pod that has this address."""
        return any(words.get(address) is Word.TAKEN for words in self.routers.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """A condition as the status holds it now."""

    type: str
    status: str
    reason: str
    message: str
    changed: str
    """lastTransitionTime as written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """Everything a decision about one service may depend on, beside its spec and the time.

    engines:    the workloads of all engine roles and revisions
    routers:    those of routers, of all revisions
    scales:     component -> pods asked for through the scale of the role, for those that have one
    wanted:     component -> pods that it should have had, as the status remembers it
    strangers:  names of pods that are not the service's own and that its Services select all the same
    current:    revision that was wholly rolled out last, as the status remembers it
    updated:    revision that the last status was of
    failed:     revision whose rollout was rolled back, as the status remembers it
    conditions: as the status holds them now
    """

    engines: tuple[Workload, ...] = ()
    routers: tuple[Workload, ...] = ()
    store: Workload | None = None
    scales: dict[Component, int] = field(default_factory=dict)
    wanted: dict[Component, int] = field(default_factory=dict)
    facts: Facts = field(default_factory=Facts)
    strangers: tuple[str, ...] = ()
    current: str = ""
    updated: str = ""
    failed: str = ""
    conditions: tuple[Condition, ...] = ()

    def said(self, condition: str) -> Condition | None:
        """A condition as the status holds it now."""
        return next((one for one in self.conditions if one.type == condition), None)

    def settled(self, now: float) -> Observed:
        """As a rollout counts it: of engines and routers that crashed and are ready again, after a while."""
        engines, routers = (tuple(w.settled(now) for w in every) for every in (self.engines, self.routers))
        return replace(self, engines=engines, routers=routers)

    def of(self, component: Component) -> tuple[Workload, ...]:
        """Workloads of one engine role."""
        return tuple(w for w in self.engines if w.component is component)

    def router_of(self, revision: str) -> Workload | None:
        """The workload of routers of one revision."""
        return next((w for w in self.routers if w.revision == revision), None)

    def exact(self, component: Component) -> bool:
        """Whether its pods can be selected by the uid of the service."""
        single = self.routers if component is Component.ROUTER else (self.store,)
        return all(w.exact for w in (self.of(component) if is_engine(component) else single) if w is not None)
