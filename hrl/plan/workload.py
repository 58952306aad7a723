"""What one step has to do: how many prompts and samples, how long they are, and which of them are computed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from math import inf

from hrl.config.arithmetic import step_sizes
from hrl.config.ppo import PPOTrainerConfig
from hrl.plan.lengths import MEAN_OVER_LONGEST, SINGLE_ANSWERS, Episodes, Lengths, episodes_of, response_of

#: Longest response over the mean at most: with a limit far above the mean nobody comes near it, see docs/scaling.md.
LONGEST_OVER_MEAN = 8.0


@dataclass(frozen=True)
class Workload:
    """The samples of one step.

    The length of a response at the quantile u of all responses is taken to be `longest * u ** tail`, the power
    being the one for which the mean is `response`. Responses that all reach the limit have power 0.

    Attributes:
        prompts: Prompts of a step; of a mini-batch or of those that teach something a mean, and so a fraction.
        samples: Samples of a prompt.
        prompt: Mean tokens of a prompt.
        response: Mean tokens of a response; of an episode, with what its environment says.
        longest_response: Tokens at which a response is cut.
        teaching: Share of the groups whose samples differ in reward; rows of the others are not run in an update.
        episodes: How the episodes are spent; None if every sample is a single answer.
    """

    prompts: float
    samples: int
    prompt: float
    response: float
    longest_response: int
    teaching: float = 1.0
    episodes: Episodes | None = None

    @classmethod
    def of(cls, config: PPOTrainerConfig, lengths: Lengths) -> Workload:
        """Return the workload of a run; lengths that are not given are a share of the longest allowed."""
        data, sizes = config.data, step_sizes(config)
        return cls(
            prompts=sizes.prompts,
            samples=sizes.samples,
            prompt=min(lengths.prompt or MEAN_OVER_LONGEST * data.max_prompt_length, data.max_prompt_length),
            response=min(response_of(config, lengths), data.max_response_length),
            longest_response=data.max_response_length,
            teaching=lengths.teaching,
            episodes=episodes_of(config, lengths),
        )

    @property
    def turns(self) -> float:
        """Turns of the policy in an episode; 1 of a single answer."""
        return (self.episodes or SINGLE_ANSWERS).turns

    @property
    def sampled(self) -> float:
        """Mean tokens of a response that the policy samples, in all its turns."""
        return (self.episodes or SINGLE_ANSWERS).sampled * self.response

    @property
    def environment_tokens(self) -> float:
        """Mean tokens of a response that its environment says."""
        return self.response - self.sampled

    @property
    def wait_s(self) -> float:
        """Seconds that an episode waits for its environment for each token that the policy samples."""
        return (self.episodes or SINGLE_ANSWERS).environment_s / self.sampled

    @property
    def shared(self) -> float | None:
        """Share of a pass's tokens that are not computed, where more than prompts is shared; None where it is not."""
        return (self.episodes or SINGLE_ANSWERS).shared

    @property
    def sequences(self) -> float:
        """Prompts × samples."""
        return self.prompts * self.samples

    @property
    def tokens(self) -> float:
        """Tokens of all rows, the prompt counted with each of its samples, as `perf/total_num_tokens` does."""
        return self.sequences * (self.prompt + self.response)

    @property
    def longest(self) -> float:
        """Tokens of the longest response: as many as allowed, but a multiple of the mean at most."""
        return min(float(self.longest_response), LONGEST_OVER_MEAN * self.response)

    @property
    def tail(self) -> float:
        """The power of the quantiles."""
        return self.longest / self.response - 1.0

    def alive(self, position: float) -> float:
        """Return the share of the responses that are longer than a number of tokens."""
        if position >= self.longest:
            return 0.0
        return 1.0 if self.tail < 1e-9 else 1.0 - (position / self.longest) ** (1.0 / self.tail)

    @cached_property
    def squared_response(self) -> float:
        """Mean of the squared length of a response."""
        return self.longest**2 / (2.0 * self.tail + 1.0)

    @property
    def running_response(self) -> float:
        """Mean tokens so far of the responses that run at one time, where finished ones are replaced by new ones.

        At a random moment a response is met in proportion to its length, and on average in its middle.
        """
        return self.squared_response / (2.0 * self.response)

    def part(self, share: float) -> Workload:
        """Return a share of the prompts with all their samples: those of a mini-batch, or those that are run."""
        return replace(self, prompts=self.prompts * share)

    def longest_of(self, rows: float) -> float:
        """Return the expected length of the longest of some responses."""
        return self.longest * (rows / (rows + 1.0)) ** self.tail

    def copies(self, ranks: int, budget: float = inf) -> float:
        """Return how often a prompt is computed for its samples.

        Once, unless there are fewer prompts than ranks, or more samples than a micro-batch holds.

        Args:
            ranks: Over which the rows are spread.
            budget: Tokens of a micro-batch.
        """
        room = max(budget - self.prompt, self.response)
        return min(float(self.samples), max(1.0, ranks / self.prompts, self.samples * self.response / room))

    def packed_tokens(self, ranks: int, budget: float = inf) -> float:
        """Return the tokens of a pass over all rows: less those that are shared, or else see `copies`."""
        if self.shared is not None:
            return (1.0 - self.shared) * self.tokens
        return self.prompts * self.copies(ranks, budget) * self.prompt + self.sequences * self.response

    def pairs(self, ranks: int, budget: float = inf) -> float:
        """Return the query–key pairs of that pass: causal in the prompt, and of a response with all before it.

        What is shared is the beginnings of rows, whose tokens have the fewest pairs: half of a row has a quarter.
        """
        of_responses = self.sequences * (self.prompt * self.response + self.squared_response / 2)
        if self.shared is not None:
            return (1.0 - self.shared**2) * (self.sequences * self.prompt**2 / 2 + of_responses)
        of_prompts = self.prompts * self.copies(ranks, budget) * self.prompt**2 / 2
        return of_prompts + of_responses
