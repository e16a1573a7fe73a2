"""What a run measures of itself while it trains, and what a machine's links give: input of simulator and planner."""
