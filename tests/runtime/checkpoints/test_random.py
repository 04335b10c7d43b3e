"""Random weights: the same for the same seed, whatever is taken first, and a model of them stays finite."""

from __future__ import annotations

import torch
from tiny_config import CONFIG

from isthmus_runtime.checkpoints.random import RandomTensors
from isthmus_runtime.layers.batch import ForwardBatch, GroupBatch, LayerKv
from isthmus_runtime.models.registry import parse_model_spec

CPU = torch.device("cpu")
SHAPES = {"a.weight": (40, 30), "b.weight": (2, 30), "norm.weight": (30,), "a.bias": (40,)}


def test_tensors_follow_from_seed_and_name() -> None:
    one, same, other = (RandomTensors(SHAPES, seed=s, device=CPU, dtype=torch.float32) for s in (1, 1, 2))
    joined = one.take("a.weight", "b.weight")
    assert torch.equal(joined, torch.cat([same.take("b.weight"), same.take("a.weight")][::-1]))
    assert not torch.equal(one.take("a.weight"), other.take("a.weight"))
    assert not torch.equal(one.take("a.weight")[:2], one.take("b.weight"))
    assert abs(float(one.take("a.weight").std()) * 30**0.5 - 1) < 0.1
    assert bool((one.take("norm.weight") == 1).all()) and not one.take("a.bias").any()
    half = RandomTensors(SHAPES, seed=1, device=CPU, dtype=torch.bfloat16)
    assert half.take("a.weight").dtype == torch.bfloat16


def test_a_model_of_them_computes() -> None:
    spec = parse_model_spec({**CONFIG, "num_hidden_layers": 12}, {}, source="config.json")
    source = RandomTensors(spec.tensor_shapes(), seed=3, device=CPU, dtype=torch.float32)
    with torch.inference_mode():
        model = spec.build(source, torch.float32)
        workspace = model.workspace(5, 8)
        kv = [LayerKv(0, torch.zeros(2, 2, 8, spec.num_kv_heads, spec.head_dim)) for _ in range(spec.num_layers)]
        group = GroupBatch(torch.ones(1, 1, dtype=torch.int32), torch.arange(8, 13))
        batch = ForwardBatch(
            token_ids=torch.arange(5, dtype=torch.int32),
            positions=torch.arange(5),
            query_start_loc=torch.tensor([0, 5], dtype=torch.int32),
            seq_lens=torch.tensor([5], dtype=torch.int32),
            groups=(group,),
            max_query_len=5,
            max_seq_len=5,
        )
        model.forward(batch, kv, workspace)
        logits = model.logits(torch.tensor([4]), workspace)
    assert logits.shape == (1, spec.vocab_size) and bool(logits.isfinite().all())
    assert 0.1 < float(logits.std()) < 10
