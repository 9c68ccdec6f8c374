"""Rounds that stay on the device: layers over static buffers, recorded once and replayed.

buckets    how far a call's shape is rounded up, so that few recordings serve every call
static     a packed call's description, in buffers that stay where they are
capture    recording and replaying: CUDA graphs, or a stand-in for tests
graphs     recordings by key, under a memory budget
storage    keys and values that outlive an engine, as recordings read and write fixed addresses
whole      one round, from drafts to acceptance, as one recording
check      whether recorded rounds are what the eager layers give
runner     what a stack asks: run these layers, decode this round
"""
