"""Where weights come from: safetensors, GGUF, hub and object storage, fetching. No pickle, no remote code."""
