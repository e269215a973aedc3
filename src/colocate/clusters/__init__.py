"""Runs on a cluster that Ray manages: ranks and servers are placed, started, watched, and begun again.

The layers of the driver, which is the process of the command, from the outside to the inside:

    launch.launch             one start after another, each from the newest checkpoint
      cluster.connected       with the cluster that is there, or one of its own
        cluster.places        placement groups: asked for, waited for, removed
          process.present     an actor in each place; after the block nothing of the run is left
            Start.run         an event loop with a coroutine for each process; the first end is the run's
              Rank.run        a rank, until it has ended
              Replica.keep    a server, again and again; its _watch asks it once a second whether it works
                Process.run   one process: "start", "follow", "follow", ... until the answer is its exit code

On its node each process is started by an actor (`actor`) and forms a process group, which ends with the actor
however the actor ends (`ProcessGroup`); Ray ends actors with their driver. The answer to "follow" is the
output of the process. The driver asks for more once it has shown that: a process that writes faster waits, as
for a slow terminal. Meanwhile the actor serves other calls: pass a signal on, ask a server whether it works.
"""
