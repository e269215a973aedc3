"""Where completions come from: the native engine, vLLM, TensorRT-LLM, transformers."""
