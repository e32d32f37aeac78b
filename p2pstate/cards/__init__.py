"""Training state on a CUDA card: how it gets into host memory while training goes on."""
