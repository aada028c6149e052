"""Uses thalweg and other packages that bring gRPC, protobuf and Abseil in one process.

Usage: check_install_beside.py before|after: when the others are used.
"""

import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path


def use_others() -> None:
    """Sends a message of protobuf's own types to a server of grpcio, which sends it back."""
    import grpc
    from google.protobuf.struct_pb2 import Struct

    echo = grpc.unary_unary_rpc_method_handler(
        lambda request, _: request,
        request_deserializer=Struct.FromString,
        response_serializer=Struct.SerializeToString,
    )
    server = grpc.server(ThreadPoolExecutor(1))
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("t.T", {"Echo": echo})])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    sent = Struct()
    sent.update({"job": "x", "rounds": [1.0, 2.0]})
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        call = channel.unary_unary(
            "/t.T/Echo",
            request_serializer=Struct.SerializeToString,
            response_deserializer=Struct.FromString,
        )
        if call(sent, timeout=30) != sent:
            raise RuntimeError("grpcio's server sent back something else")
    server.stop(None).wait()


def use_thalweg() -> None:
    """Sums a tensor over a group of one worker, through a sidecar."""
    import torch
    import torch.distributed as dist

    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    store = dist.TCPStore("127.0.0.1", 0, is_master=True)
    dist.init_process_group("thalweg", store=store, rank=0, world_size=1)
    value = torch.ones(3, dtype=torch.int64)
    dist.all_reduce(value)
    torch.testing.assert_close(value, torch.ones(3, dtype=torch.int64))
    dist.destroy_process_group()


def check_mapped() -> None:
    """gRPC and protobuf belong to the server programs, and no worker loads those of thalweg."""
    mapped = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines()}
    ours = [path for path in mapped if "thalweg" in path and ("grpc" in path or "proto" in path)]
    if ours:
        raise RuntimeError(f"thalweg has loaded {', '.join(sorted(ours))}")


def main() -> None:
    steps = {"before": [use_others, use_thalweg, use_others], "after": [use_thalweg, use_others]}
    for step in [*steps[sys.argv[1]], check_mapped]:
        step()


if __name__ == "__main__":
    main()
