"""LangChain's OpenAIEmbeddings: documents in batches, a query, async."""

import asyncio
import math
import sys

from langchain_openai import OpenAIEmbeddings

TEXTS = ["Two seas and a narrow strip of land.", "A fox.", "Zwei Meere, eine Landenge. " * 20, "A fox."]

# Its own check of lengths counts tokens of OpenAI's models and sends their ids: users of others switch it off.
embeddings = OpenAIEmbeddings(
    model="test", base_url=f"{sys.argv[1]}/v1", api_key="none", check_embedding_ctx_length=False, max_retries=0
)
vectors = embeddings.embed_documents(TEXTS)
assert len(vectors) == len(TEXTS) and vectors[1] == vectors[3] != vectors[0]
assert all(abs(math.hypot(*vector) - 1) < 1e-5 for vector in vectors)
assert embeddings.embed_query(TEXTS[0]) == vectors[0] == asyncio.run(embeddings.aembed_query(TEXTS[0]))
many = embeddings.embed_documents([f"Text number {i}." for i in range(100)], chunk_size=32)
assert many[99] == embeddings.embed_query("Text number 99.")
