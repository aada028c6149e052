"""Uses thalweg and other packages that bring gRPC, protobuf and Abseil in one process.

Usage: check_install_beside.py before|after PACKAGE…: when the others are used, and which.
"""

import os
import re
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path


def use_grpc() -> None:
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


def use_tensorflow() -> None:
    import tensorflow

    doubled = tensorflow.function(lambda x: x + x)(tensorflow.constant([1.0, 2.0]))
    if doubled.numpy().tolist() != [2.0, 4.0]:
        raise RuntimeError(f"tensorflow has doubled 1 and 2 to {doubled}")


def field(number: int, value: int | bytes) -> bytes:
    """Returns a field of a protobuf message; all numbers here are below 128."""
    if isinstance(value, int):
        return bytes([number << 3, value])
    return bytes([number << 3 | 2, len(value)]) + value


def identity_model() -> bytes:
    """Returns an ONNX model whose output y is its input x, two float32."""
    shape = field(2, field(1, field(1, 2)))
    two_floats = field(2, field(1, field(1, 1) + shape))
    node = field(1, b"x") + field(2, b"y") + field(4, b"Identity")
    ends = field(11, field(1, b"x") + two_floats) + field(12, field(1, b"y") + two_floats)
    graph = field(1, node) + field(2, b"graph") + ends
    return field(1, 8) + field(7, graph) + field(8, field(2, 13))


def use_onnxruntime() -> None:
    import numpy
    import onnxruntime

    session = onnxruntime.InferenceSession(identity_model(), providers=["CPUExecutionProvider"])
    [found] = session.run(None, {"x": numpy.array([1, 2], numpy.float32)})
    if found.tolist() != [1.0, 2.0]:
        raise RuntimeError(f"onnxruntime has copied 1 and 2 to {found}")


def start_ray(attempts: int = 10) -> None:
    """Starts a cluster of one node. ray gives up after 30 s, which a busy machine may need."""
    # It neither keeps a token in the home directory nor reports to its makers.
    os.environ |= {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
    import ray

    for left in reversed(range(attempts)):
        try:
            ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
            return
        except Exception as error:
            if not left or "timed out during startup" not in str(error):
                raise
            print(f"starting ray again: {error}")
            ray.shutdown()


def use_ray() -> None:
    """Lets a cluster of one node run a task."""
    import ray

    start_ray()
    found = ray.get(ray.remote(lambda x: x + 1).remote(1), timeout=300)
    ray.shutdown()
    if found != 2:
        raise RuntimeError(f"a task of ray has added 1 and 1 to {found}")


OTHERS: dict[str, Callable[[], None]] = {
    "grpc": use_grpc,
    "tensorflow": use_tensorflow,
    "onnxruntime": use_onnxruntime,
    "ray": use_ray,
}


def use_others(wanted: list[str]) -> None:
    for name in wanted:
        OTHERS[name]()
        print(f"used {name} {sys.modules[name].__version__}")


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
    print("used thalweg")


def check_mapped() -> None:
    """gRPC and protobuf belong to the server programs, and no worker loads those of thalweg."""
    mapped = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines()}
    ours = [path for path in mapped if re.search(r"/thalweg(\.libs)?/[^/]*(grpc|proto)", path)]
    if ours:
        raise RuntimeError(f"thalweg has loaded {', '.join(sorted(ours))}")


def main() -> None:
    when, *wanted = sys.argv[1:]
    if when == "before":
        use_others(wanted)
    use_thalweg()
    use_others(wanted)
    check_mapped()


if __name__ == "__main__":
    main()
