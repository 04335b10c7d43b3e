"""What a chat with the small default model must answer."""

from collections.abc import Sequence

from processes import MODEL

QUESTIONS = ("What is the capital of France?", "Name three colours.", "What is an isthmus? Answer in one sentence.")
MAX_TOKENS = 24


def greedy_answers(questions: Sequence[str], max_tokens: int) -> dict[str, str]:
    """Greedy answers of `transformers` in fp32, from the same model folder and its own chat template."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    answers = {}
    for question in questions:
        chat = [{"role": "user", "content": question}]
        ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt")
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens, do_sample=False, top_p=None,
            temperature=None, pad_token_id=tokenizer.eos_token_id,
        )  # fmt: skip
        answers[question] = tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
    return answers
