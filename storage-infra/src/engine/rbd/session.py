"""Answers requests about a Ceph cluster over one connection: JSON objects, one per line, on stdin and stdout.

The data of a write follows its request, that of a read its answer.
"""

import contextlib
import functools
import json
import signal
import sys

try:
    import rados
    import rbd
except ImportError as error:
    sys.exit(f"{error}; install Ceph's Python bindings (Debian: python3-rados, python3-rbd)")

conf, keyring, user, monitors_timeout, timeout = sys.argv[1:]


def required(what, call, *arguments, **options):
    """The result of a call. What it misses is not the image of a request, so its error has no code."""
    try:
        return call(*arguments, **options)
    except rados.ObjectNotFound as error:
        raise RuntimeError(f"{what}: {error}") from error


@functools.cache
def cluster():
    options = {"keyring": keyring, "log_to_stderr": "false", "err_to_stderr": "false"}
    options |= dict.fromkeys(["client_mount_timeout", "rados_mon_op_timeout"], monitors_timeout)
    connection = required(f"cannot read {conf}", rados.Rados, conffile=conf, rados_id=user, conf=options)
    required(f"cannot connect with {conf} and {keyring}", connection.connect)
    return connection


@functools.cache
def images(pool, namespace):
    place = required(f"cannot open the Ceph pool {pool}", cluster().open_ioctx, pool)
    place.set_namespace(namespace)
    return place


def opened(image, read_only=True):
    return rbd.Image(images(image["pool"], image["namespace"]), image["name"], read_only=read_only)


@functools.cache
def kept(pool, namespace, name, read_only):
    """An image that stays open until the end, for its data."""
    return kept_open.enter_context(rbd.Image(images(pool, namespace), name, read_only=read_only))


def data_of(image, read_only=True):
    return kept(image["pool"], image["namespace"], image["name"], read_only)


def monitors(commands):
    answers = []
    for command in commands:
        code, output, why = cluster().mon_command(json.dumps({**command, "format": "json"}), b"")
        if code:
            raise rados.OSError(f"{command['prefix']}: {why}", abs(code))
        answers.append(json.loads(output) if output else None)
    return answers


def names(pool, namespace):
    return rbd.RBD().list(images(pool, namespace))


def size(image):
    with opened(image) as one:
        return one.size()


def watchers(image):
    with opened(image) as one:
        return [{"address": watcher["addr"], "client": watcher["id"]} for watcher in one.watchers_list()]


def metadata(image, key):
    with opened(image) as one:
        try:
            return one.metadata_get(key)
        except KeyError:
            return None


def set_metadata(image, key, value):
    with opened(image, read_only=False) as one:
        one.metadata_set(key, value)


def create(image, bytes):
    rbd.RBD().create(images(image["pool"], image["namespace"]), image["name"], bytes, old_format=False)


def resize(image, bytes):
    with opened(image, read_only=False) as one:
        one.resize(bytes, allow_shrink=False)


def rename(image, to):
    rbd.RBD().rename(images(image["pool"], image["namespace"]), image["name"], to)


def examine(image):
    """What tells whether an image of others can become a volume. None for the format that has no metadata."""
    with opened(image) as one:
        if one.old_format():
            return None
        locks = one.list_lockers() or {"lockers": []}
        return {
            "id": one.id(),
            "bytes": one.size(),
            # Ceph keeps those of clones in the trash.
            "snapshots": [
                snapshot["name"]
                for snapshot in one.list_snaps()
                if snapshot["namespace"] != rbd.RBD_SNAP_NAMESPACE_TYPE_TRASH
            ],
            "locks": [cookie for _, cookie, _ in locks["lockers"] if not cookie.startswith("auto ")],
            "migrates": bool(one.features() & rbd.RBD_FEATURE_MIGRATING),
        }


def remove_metadata(image, key):
    with opened(image, read_only=False) as one, contextlib.suppress(KeyError):
        one.metadata_remove(key)


def cut(image, keep, bytes):
    """Removes the data from an offset on."""
    with opened(image, read_only=False) as one:
        one.resize(keep, allow_shrink=True)
        one.resize(bytes)


def modified(image):
    return int(data_of(image).modify_timestamp().timestamp())


def extents(image, offset, length):
    """Offset and length of each part of a range that holds data, also a parent's."""
    found = []

    def add(start, size, exists):
        if exists:
            found.append([start, size])

    data_of(image).diff_iterate(offset, length, None, add, include_parent=True, whole_object=False)
    return found


def read(image, offset, length):
    data = data_of(image).read(offset, length)
    answer_data.append(data)
    return len(data)


def write(image, offset, length):
    # Read in any case: the next request is behind it.
    data = sys.stdin.buffer.read(length)
    data_of(image, read_only=False).write(data, offset)


def flush(image):
    data_of(image, read_only=False).flush()


def close():
    """Closes the images whose data was read or written."""
    kept.cache_clear()
    kept_open.close()


CALLS = {
    call.__name__: call
    for call in [
        monitors, names, size, watchers, metadata, set_metadata, remove_metadata, create, resize, cut, rename,
        examine, modified, extents, read, write, flush, close,
    ]
}
kept_open = contextlib.ExitStack()
answer_data = []

while line := sys.stdin.buffer.readline():
    request = json.loads(line)
    # Ends the process if Ceph does not answer, also within the library.
    signal.alarm(int(timeout))
    try:
        answer = {"value": CALLS[request.pop("call")](**request)}
    except Exception as error:
        answer = {"errno": getattr(error, "errno", None), "why": str(error)}
    signal.alarm(0)
    sys.stdout.buffer.write(json.dumps(answer).encode() + b"\n" + b"".join(answer_data))
    sys.stdout.buffer.flush()
    answer_data.clear()

signal.alarm(int(timeout))
close()
