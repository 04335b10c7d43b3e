"""LiteLLM: embeddings of several texts, as floats and as base64."""

import base64
import struct
import sys

import litellm

TEXTS = ["Two seas and a narrow strip of land.", "A fox."]
service = {"model": "openai/test", "api_base": f"{sys.argv[1]}/v1", "api_key": "none", "num_retries": 0}

floats = [entry["embedding"] for entry in litellm.embedding(input=TEXTS, encoding_format="float", **service).data]
packed = [entry["embedding"] for entry in litellm.embedding(input=TEXTS, encoding_format="base64", **service).data]
for vector, text in zip(floats, packed, strict=True):
    raw = base64.b64decode(text)
    assert struct.pack(f"<{len(vector)}f", *vector) == raw
assert len(floats) == 2 and floats[0] != floats[1]
