"""The trainer's side of rollout servers: client, pool, push of weights."""
