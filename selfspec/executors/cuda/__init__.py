"""The CUDA executor: layers and whole rounds as CUDA graphs over static buffers, recorded once and replayed.

shapes        rounds the shape of a call up, so that few recordings serve all calls
static_rows   the description of a packed call in buffers at fixed addresses
capture       records and replays: CUDA graphs, or a substitute for tests
graphs        what is kept for recordings: the recordings by key, and KV pages at fixed addresses
round_inputs  what a recorded round reads and returns
whole_round   one round, from drafting to acceptance, as one recording
rounds        rounds of a batch from one recording, launched without waiting for their results
self_check    compares recorded rounds with the eager layers
packed_linear linear layers of one input as one product
fused_body    the layers of Llama-shaped models in ten launches each
body_choice   chooses between fused layers and the model's own modules
runner        runs layers or a round of a split model from recordings
exact_body    fused layers whose bits for a token depend on no other token of a call
exact         runs exact mode by them
executor      runs plans by the runner
"""
