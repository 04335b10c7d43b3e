"""What a chat with the small default model must answer."""

from collections.abc import Callable, Sequence
from typing import Any

from processes import MODEL

QUESTIONS = ("What is the capital of France?", "Name three colours.", "What is an isthmus? Answer in one sentence.")
MAX_TOKENS = 24
Allowed = Callable[[Sequence[int]], bytes]


def greedy_answers(
    questions: Sequence[str],
    max_tokens: int,
    allowed: Callable[[], Allowed] | None = None,
    repetition_penalty: float = 1.0,
) -> dict[str, str]:
    """Greedy answers of `transformers` in fp32, from the same model folder and its own chat template.

    `allowed()` gives, for one answer, the mask of the token after those generated (`interfaces.steps.RowMask`).
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    answers = {}
    for question in questions:
        chat = [{"role": "user", "content": question}]
        ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt")
        masks = [] if allowed is None else [_masks(ids.shape[1], allowed())]
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens, do_sample=False, top_p=None,
            temperature=None, pad_token_id=tokenizer.eos_token_id, logits_processor=masks,
            repetition_penalty=repetition_penalty,
        )  # fmt: skip
        answers[question] = tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
    return answers


def _masks(prompt_len: int, allowed: Allowed) -> Any:
    import torch

    def process(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        mask = allowed(ids[0, prompt_len:].tolist())
        refused = [i for i in range(scores.shape[1]) if not mask[i // 8] >> i % 8 & 1]
        scores[0, refused] = float("-inf")
        return scores

    return process
