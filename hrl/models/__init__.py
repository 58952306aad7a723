"""Language models: where they come from, whether hrl runs them right, and how a packed batch goes through one."""

from hrl.models.companions import refuse_broken_companions

refuse_broken_companions()
