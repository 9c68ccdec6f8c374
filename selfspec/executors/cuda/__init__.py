"""Rounds that stay on the device: layers over static buffers, recorded once and replayed.

shapes        how far a call's shape is rounded up, so that few recordings serve every call
static_rows   a packed call's description, in buffers that stay where they are
capture       recording and replaying: CUDA graphs, or a stand-in for tests
graphs        recordings by key, under a memory budget
storage       keys and values that outlive an engine, as recordings read and write fixed addresses
whole_round   one round, from drafts to acceptance, as one recording
self_check    whether recorded rounds are what the eager layers give
runner        what a stack asks: run these layers, decode this round
executor      runs plans by these
"""
