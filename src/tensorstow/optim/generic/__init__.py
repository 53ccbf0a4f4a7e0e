"""Any torch optimizer's states, stowed: its own step runs over one piece after the other."""
