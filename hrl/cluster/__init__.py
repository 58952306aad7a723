"""What every trainer shares: roles on pools of processes, worker groups, checkpoints, the machine itself."""
