"""Runs on a cluster that Ray manages: ranks and servers are placed, started, watched, and begun again.

How the driver, the process of the command, does that, from the outside to the inside:

    launch.launch             one start after another, each from the newest checkpoint
      cluster.connected       with the cluster that is there, or one of its own
        cluster.places        placement groups: asked for, waited for, removed
          process.present     an actor in each place; after the block nothing of the run is left
            Start.run         an event loop with a coroutine for each process; the first end is the run's
              Rank.run        a rank, until it has ended
              Replica.keep    a server, again and again; its _watch asks it once a second whether it works
                Process.run   one process: "start", "follow", "follow", ... until the answer is its exit code

On its node a process has an actor above it (`actor`) and is a group that ends with the actor, however that
ended (`ProcessGroup`); Ray ends actors with their driver. What a process writes is the answer to "follow",
and the driver asks for more once it has shown that: who writes faster waits, as for a slow terminal. The
actor answers other questions meanwhile: to pass a signal on, to ask a server whether it works.
"""
