# Boots systemd in a root filesystem: as process 1 of new namespaces for processes, mounts, network, host name and IPC.
# Arguments: the root filesystem, a control group (version 2), a file for the PID of systemd on this host, and a folder
# that both share.
set -e
root=$1 group=$2 pid=$3 shared=$4
# Here /proc is still that of the host, which knows this shell by another PID.
read -r own _ < /proc/self/stat
echo "$own" > "$pid"
echo 0 > "$group/cgroup.procs"

mount --make-rprivate /
mount --bind "$root" "$root"
cd "$root"
mount -t proc proc proc
# Settings of the host's kernel, which it must not change.
mount --bind proc/sys proc/sys
mount -o remount,bind,ro proc/sys
mount -t sysfs -o ro sysfs sys
mount -t tmpfs tmpfs run
mount -t tmpfs -o mode=755 tmpfs dev
for device in "null 1 3" "zero 1 5" "full 1 7" "random 1 8" "urandom 1 9" "tty 5 0"; do
  set -- $device
  mknod -m 666 "dev/$1" c "$2" "$3"
done
mkdir dev/pts dev/shm
mount -t devpts -o newinstance,ptmxmode=0666 devpts dev/pts
mount -t tmpfs tmpfs dev/shm
ln -s pts/ptmx dev/ptmx
ln -s /proc/self/fd dev/fd
mkdir -p "$root$shared"
mount --bind "$shared" "$root$shared"

mkdir run/host
pivot_root . run/host
umount --lazy /run/host
rmdir /run/host
# Its own view of control groups begins in its group.
exec unshare --cgroup sh -ec '
mount -t cgroup2 cgroup2 /sys/fs/cgroup
exec setpriv --bounding-set=-sys_module,-sys_rawio,-sys_time \
  env -i container=lab PATH=/usr/sbin:/usr/bin:/sbin:/bin /lib/systemd/systemd --show-status=no'
