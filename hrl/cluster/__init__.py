"""What every trainer shares: roles on pools of processes, worker groups, plans, checkpoints, the machine itself."""
