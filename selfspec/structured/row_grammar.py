"""`RowGrammar`: where a row is in its grammar, along its drafts and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from selfspec.errors import GrammarError

BITS = 32  # of a mask's words
WHAT = "the grammar of structured_outputs or tools"
MOST_SAID = 200  # characters of a reason
Mask = NDArray[np.uint32]  # [-(-vocab // 32)]: bit t % 32 of word t // 32 is whether token t is allowed


class RowGrammar:
    """A row's grammar. A position is named by the tokens from the row's last taken token up to it: `ahead`.

    The matcher goes along them, and back to where they part from those of the call before, so that the masks of a
    draft are still known when it is verified.

    Args:
        matcher: llguidance's, at the beginning of the grammar; it is the row's own.
        vocab_size: of the logits.
    """

    def __init__(self, matcher: Any, vocab_size: int) -> None:
        self._matcher, self._num_words = matcher, -(-vocab_size // BITS)
        self._ahead: list[int] = []  # tokens that the matcher has read beyond the taken ones
        self._masks: list[tuple[Mask, int] | None] = [None]  # after the first n of them, with their addresses
        self._spare: list[tuple[Mask, int]] = []
        self._all = self._new_mask()
        self._all[0].fill((1 << BITS) - 1)

    def mask(self, ahead: Sequence[int] = ()) -> Mask:
        """The tokens that may follow, not to be changed; all of them where `ahead` is not of the grammar itself.

        It is valid until another position is asked for that does not begin like this one, or until tokens are taken.

        Raises:
            GrammarError: the grammar is too complex to be followed here.
        """
        if not self._reaches(ahead):
            return self._all[0]  # after a drafted token that verification rejects
        return (self._masks[-1] or self._compute())[0]

    def follow(self, at: int, token: int) -> int:
        """The same token by token, in the words of `kernels/cpu/grammars.h`: the mask's address, plus 1 at the end.

        Args:
            at: the number of tokens before `token`, which earlier calls have named; -1: the token does not count.
        """
        ahead, masks = self._ahead, self._masks
        if 0 <= at < len(ahead) and ahead[at] != token:
            self._go_back(at)
        if at == len(ahead) and self._matcher.try_consume_tokens([token]):
            ahead.append(token)
            masks.append(None)
        if at >= len(ahead):
            self._check()
            return self._all[1] + self.has_ended
        found = masks[at + 1]
        if found is None:
            if len(ahead) > at + 1:
                self._go_back(at + 1)
            found = self._compute()
        return found[1] + (len(ahead) == at + 1 and self.has_ended)

    @property
    def has_ended(self) -> bool:
        """Whether nothing may follow where the last call was."""
        return bool(self._matcher.is_stopped())

    def _compute(self) -> tuple[Mask, int]:
        """The mask where the matcher is."""
        found = self._masks[-1] = self._spare.pop() if self._spare else self._new_mask()
        self._matcher.unsafe_compute_mask_ptr(found[1], found[0].nbytes)
        self._check()
        return found

    def _new_mask(self) -> tuple[Mask, int]:
        made = np.zeros(self._num_words, np.uint32)
        return made, made.ctypes.data

    def _go_back(self, count: int) -> None:
        """Roll the matcher back to the first `count` tokens."""
        self._matcher.rollback(len(self._ahead) - count)
        del self._ahead[count:]
        self._forget(self._masks[count + 1 :])
        del self._masks[count + 1 :]

    def _forget(self, masks: list[tuple[Mask, int] | None]) -> None:
        self._spare += [one for one in masks if one is not None]

    def num_allowed(self, ahead: Sequence[int]) -> int:
        """How many of these tokens the grammar allows, one after the other."""
        self._reaches(ahead)
        return len(self._ahead)

    def forced(self, most: int, ahead: Sequence[int] = ()) -> list[int]:
        """At most so many tokens after `ahead`, each of them the only one that its mask allows."""
        found: list[int] = []
        while len(found) < most and self._reaches([*ahead, *found]) and not self._matcher.is_stopped():
            more = self._matcher.compute_ff_tokens() or self._single([*ahead, *found])
            if not more:
                break
            found += more
        return found[:most]

    def _single(self, ahead: Sequence[int]) -> list[int]:
        """The token after `ahead`, if there is only one."""
        mask = self.mask(ahead)
        [words] = mask.nonzero()
        if len(words) != 1 or int(mask[words[0]]).bit_count() != 1:
            return []
        return [int(words[0]) * BITS + int(mask[words[0]]).bit_length() - 1]

    def take(self, tokens: Sequence[int]) -> tuple[int, bool]:
        """Go on by the tokens of a round: how many there are up to the grammar's end, and whether it has ended.

        Raises:
            GrammarError: a token that the grammar does not allow, since nothing else was left to pick.
        """
        count = len(tokens)
        if self._ahead[:count] != list(tokens):  # else a program of rounds has gone on from there
            self._reaches(tokens)
        taken = min(count, len(self._ahead))
        self._forget(self._masks[:taken])
        del self._ahead[:taken], self._masks[:taken]
        has_ended = not self._ahead and self.has_ended
        self._check()
        if taken < count and not has_ended:
            raise GrammarError(
                f"{WHAT} allows no token that is left to pick: logits_processors, no_repeat_ngram_size or "
                "logits that are no numbers exclude all of them"
            )
        return taken, has_ended

    def _reaches(self, ahead: Sequence[int]) -> bool:
        """Bring the matcher there; False where the grammar does not allow it, and it stands as near as may be."""
        known, wanted = self._ahead, list(ahead)
        same = len(known)
        if wanted[:same] != known:
            pairs = zip(known, wanted, strict=False)
            same = next((i for i, (a, b) in enumerate(pairs) if a != b), min(same, len(wanted)))
        if same < len(known):
            self._go_back(same)
        if same < len(wanted):
            more = wanted[same : same + self._matcher.try_consume_tokens(wanted[same:])]
            known += more
            self._masks += [None] * len(more)
            self._check()
        return len(known) == len(wanted)

    def _check(self) -> None:
        if self._matcher.is_error():
            raise GrammarError(f"{WHAT} cannot be followed further: {reason_of(self._matcher.get_error())}")


def reason_of(problem: str) -> str:
    """One line of an error of llguidance, whose first line may only say where it stands."""
    lines = [line.strip() for line in problem.splitlines() if line.strip()]
    named = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    said = (named or lines or ["for an unknown reason"])[0]
    return said if len(said) <= MOST_SAID else f"{said[: MOST_SAID - 3]}..."
