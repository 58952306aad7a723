"""Launch lines of verl, OpenRLHF and TRL, as launch lines of hrl."""
