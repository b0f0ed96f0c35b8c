"""A process that uses the GPU for a moment and prints what it found, as one line of JSON.

It is started as ranks will be, so it shows whether they can use the GPU, without torch and within a
second. Run as ``python -m distca.runtime.gpu_probe``.
"""

import json
import sys
from ctypes import CDLL, byref, c_char_p, c_int, c_size_t, c_void_p, create_string_buffer
from typing import Any

MULTIPROCESSORS = 16  # CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT


class CudaError(Exception):
    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code


def probe() -> dict[str, Any]:
    """Returns name, SMs, free and total bytes of GPU 0, as this process sees it."""
    cuda = CDLL("libcuda.so.1")

    def call(name: str, *arguments: Any) -> None:
        if code := getattr(cuda, name)(*arguments):
            text = c_char_p()
            cuda.cuGetErrorString(code, byref(text))
            raise CudaError(code, f"{name}: {(text.value or b'unknown error').decode()}")

    device, context, sms = c_int(), c_void_p(), c_int()
    name, free, total = create_string_buffer(100), c_size_t(), c_size_t()
    call("cuInit", 0)
    call("cuDeviceGet", byref(device), 0)
    call("cuDeviceGetName", name, len(name), device)
    call("cuDevicePrimaryCtxRetain", byref(context), device)
    call("cuCtxSetCurrent", context)
    call("cuDeviceGetAttribute", byref(sms), MULTIPROCESSORS, device)
    call("cuMemGetInfo_v2", byref(free), byref(total))
    return {
        "name": name.value.decode(),
        "sms": sms.value,
        "free_bytes": free.value,
        "total_bytes": total.value,
    }


def main() -> None:
    try:
        found = probe()
    except CudaError as error:
        found = {"error": str(error), "code": error.code}
    except OSError as error:  # no driver
        found = {"error": str(error), "code": 0}
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
