"""Machines and containers that are not there, for the start's tests."""

import os
from pathlib import Path
from typing import Any

from fmengine.start.machine import Machine
from fmengine.start.mounts import Mount, parse

PREFIX = Path("/opt/fmengine")

APPTAINER = """\
100 90 0:50 / / ro,nosuid,nodev,relatime - overlay overlay ro,lowerdir=/var/lib/apptainer/mnt/session/rootfs
101 100 0:5 / /dev rw,nosuid - devtmpfs devtmpfs rw
102 101 0:23 / /dev/shm rw - tmpfs tmpfs rw
103 100 0:21 / /proc rw - proc proc rw
104 100 8:1 /etc/hosts /etc/hosts rw - ext4 /dev/sda1 rw
105 100 8:1 /tmp /tmp rw - ext4 /dev/sda1 rw
106 100 0:44 /me /home/me rw - nfs4 server:/home rw
107 100 0:45 / /p/project\\040x rw - lustre mds@tcp:/p rw
108 100 8:1 /usr/bin/nvidia-smi /usr/bin/nvidia-smi ro - ext4 /dev/sda1 rw
109 100 8:1 /usr/lib64/libcuda.so.1 /.singularity.d/libs/libcuda.so.1 ro - ext4 /dev/sda1 rw
"""

UNDERLAY = """\
100 90 0:60 / / ro - tmpfs tmpfs rw
101 100 7:3 /usr /usr ro - squashfs /dev/loop3 ro
102 100 7:3 /opt /opt ro - squashfs /dev/loop3 ro
103 100 0:44 /me /home/me rw - nfs4 server:/home rw
"""

DOCKER = """\
700 600 0:70 / / ro,relatime - overlay overlay ro,lowerdir=/var/lib/docker/overlay2/l/A
701 700 0:71 / /proc rw - proc proc rw
702 700 0:72 / /dev rw - tmpfs tmpfs rw
703 702 0:73 / /dev/shm rw - tmpfs shm rw,size=65536k
704 700 254:0 /var/lib/docker/containers/1/hostname /etc/hostname rw - ext4 /dev/vda rw
705 700 254:0 /home/me/project /workspace rw - ext4 /dev/vda rw
706 700 0:74 / /tmp rw - tmpfs tmpfs rw
"""


def bound_at(folder: Path) -> tuple[Mount, ...]:
    """A container that has one folder of the host, which is really there."""
    return (*parse("1 0 0:1 / / ro - overlay overlay ro"), Mount(folder.resolve(), "8:1", "ext4"))


def machine(**values: Any) -> Machine:
    """A machine with this process's user, in a Docker container, where everything is right."""
    defaults: dict[str, Any] = {
        "prefix": PREFIX,
        "cwd": Path("/workspace"),
        "uid": os.getuid(),
        "user": "me",
        "process": "4711",
        "shared_memory": 8 << 30,
        "mounts": parse(DOCKER),
        "free_bytes": lambda folder: 1 << 30,
    }
    return Machine(**{**defaults, **values})
