"""Memory: what is resident, what is time-shared, and the planner that works it out beforehand."""
