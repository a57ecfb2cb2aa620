"""One file a Hugging Face ``model_type``; weights and names beside them."""
