"""The text of docs/nodes.md, before the tables."""

PAGE = """# Several nodes on one machine

Written by `python -m benchmarks.nodes --write`.

`dion plan` says what an exchange costs from bytes and the speed of links ([command-line.md](command-line.md)). This
page lays that beside ranks that really communicate: 2 or 4 "nodes", with one or two ranks each, on one machine.

```
python -m benchmarks.nodes [--networks 2x1,4x2] [--rates none,100,20] [--transports full,local] [--write]
```

It needs Linux, root, and `ip` and `tc` (package iproute2), and says what is missing. A container usually needs
`--privileged`, or `--cap-add NET_ADMIN --cap-add SYS_ADMIN`.
`tests/multiprocess/test_nodes.py` runs the smallest of it, and is skipped with the same reason.

## How it works

A node is a network namespace with a loopback and one interface, eth0: a veth pair to a bridge in one more namespace.
Nothing leads from these namespaces to the machine's own network. Each end of a pair has a token bucket (tbf) of the
rate, so that a node sends and receives at that rate; nothing is dropped. Ranks of torch.distributed over gloo meet at
the first node's address; ranks of one node reach each other over its loopback, which is not limited.

The ranks train the demo's model (0.7 million parameters, fp32) under FSDP2 with NorDion2, once for every rate and
transport, and run before other processes of the machine where the kernel grants it. The messages of FSDP2 cross the
same links, but between steps of the optimizer. All ranks start a step of the optimizer together, after a barrier.
Measured in it:

- *wait*: the time in which a rank does nothing but wait for messages of the optimizer; the mean of the ranks, and of
  that the median of the steps. Messages that are under way while the rank computes do not count.
- *step*: the slowest rank's time.
- bytes of rows to ranks of the same node and of others, and what the interface of the node counts meanwhile.

Planned is what `dion plan` gives for the same mesh as *exposed*, with a machine profile measured by the code of
`dion bench` in the same namespaces without a limit, all ranks at once. The rate between nodes is then limited to the
link's, of which a TCP connection can use 1448 of 1514 bytes, over the ranks that share it. A value read on the host
costs no time on a CPU.

The plan has both ways of a link used at once. gloo does that, or lets one way follow the other, as it happens. So
there is a second figure, with half the rate, and a wait between the two is as planned.

Time is bounded everywhere: a training that does not end, or a rank that dies, ends all ranks, and all namespaces are
removed, also after an error, Ctrl-C or SIGTERM. What a killed process leaves behind, the next run removes.

## What is seen

MEASURED

![Waits measured and planned by rate of the link](images/nodes-exchange.png)

Dots are measured, lines planned, and the band above a line reaches to where one way follows the other.

![Waits by the number of ranks](images/nodes-world.png)

![Whole steps by rate of the link](images/nodes-step.png)

## What the plan leaves out

- A message of gloo has its own handshake, and takes its turn among others on the same link; the plan knows only the
  latency of a small all-to-all on links without a limit. Nor does it count TCP's acknowledgements, the agreement on
  which gradients are there, and the first fill of the token buckets, 16 KiB.
- The plan takes, for every bucket, the rank that sends most, at its share of the node's link, and lets messages follow
  each other. Where the other ranks of the node have less to send, or messages of two buckets of different owners are
  under way together, the real step is faster: measured over planned may be below 1.
- All ranks share the machine's cores. A rank that waits for one that is still computing counts as waiting, and the
  plan, which knows a device for each rank, has no such waits. Two ranks on two cores compute side by side. Four and
  eight do not, and the switch's work is done by the same cores: there the figures mean something only where the link
  is so slow that computing does not matter. Without a limit, and at 1000 Mbit/s, they show the cores, not the links.
- The host's own time. Planned steps therefore have the computing time that was measured without a limit.

"""
