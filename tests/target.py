"""`Target` as most tests use it: prompts and options in, completions or rounds out."""

from selfspec import hub, target

DRAFTING = (
    "policy",
    "exit_layer",
    "num_draft_tokens",
    "drafts",
    "datastore",
    "reuse_responses",
    "max_batch_size",
    "learn",
    "exact",
    "burst",
)


class Target(target.Target):
    def stream(self, prompts, **options):
        drafting = {name: options.pop(name) for name in DRAFTING if name in options}
        return self.rounds(self.requests(prompts, options), **drafting)

    def generate(self, prompts, burst=target.WHOLE_BURST, **options):
        rounds = self.stream(prompts, burst=burst, **options)
        done = [row.completion for round_ in rounds for row in round_.rows if row.completion is not None]
        return sorted(done, key=lambda completion: completion.request_id)


def load(model, tokenizer=None, **options):
    return hub.open_target(model, tokenizer, **options, kind=Target)
