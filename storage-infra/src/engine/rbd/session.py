"""Answers requests about a Ceph cluster over one connection: JSON objects, one per line, on stdin and stdout."""

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


CALLS = {call.__name__: call for call in [monitors, names, size, watchers, metadata, set_metadata, create, resize, rename]}

for line in sys.stdin:
    request = json.loads(line)
    # Ends the process if Ceph does not answer, also within the library.
    signal.alarm(int(timeout))
    try:
        answer = {"value": CALLS[request.pop("call")](**request)}
    except Exception as error:
        answer = {"errno": getattr(error, "errno", None), "why": str(error)}
    signal.alarm(0)
    print(json.dumps(answer), flush=True)
