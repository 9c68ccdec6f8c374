"""The CUDA executor: layers and whole rounds as CUDA graphs over static buffers, recorded once and replayed.

capture       records and replays: CUDA graphs, or a substitute for tests
graphs        what is kept for recordings: the recordings by key, and KV pages at fixed addresses
rounds        one round as one recording: what it reads, does and returns, and rounds launched one after the other
device_work   what several threads give one device, in one order
self_check    compares recorded rounds with the eager layers
packed_linear linear layers of one input as one product
fused_body    the layers of Llama-shaped models in ten launches each
skinny_body   the same in five launches each, for calls of few tokens
body_checks   compares fused layers with the model's own modules, and a row alone with the same among others
body_choice   chooses between fused layers and the model's own modules
runner        makes and keeps the recordings of a split model's rounds
exact_body    fused layers whose bits for a token depend on no other token of a call
exact         runs exact mode by them
executor      runs plans by the runner
"""
