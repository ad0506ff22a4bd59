/* Stands before libc's calls that change files below a folder: the n-th one kills the process or finds the disk full.

A write that is hit has written half of its bytes. A full disk stays full: every later write fails too, and what removes
works. Loaded by LD_PRELOAD; arm() begins to count, and counted() says how far it came. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

enum { KILL, FULL };

static char root[PATH_MAX];
static long count, at;
static int fault;

void arm(const char *folder, int kind, long number) {
    snprintf(root, sizeof root, "%s", folder);
    fault = kind, at = number, count = 0;
}

long counted(void) { return count; }

static int below_path(int folder, const char *path) {
    char whole[2 * PATH_MAX], link[64];
    if (!root[0]) return 0;
    if (path[0] == '/') return !strncmp(path, root, strlen(root));
    if (folder == AT_FDCWD) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", folder);
    ssize_t length = readlink(link, whole, sizeof whole - 1);
    return length > 0 && !strncmp(whole, root, strlen(root));
}

static int below_file(int file) { return root[0] && below_path(file, ""); }

static int hit(void) { return ++count == at || (fault == FULL && at && count > at); }

static void die(void) { kill(getpid(), SIGKILL); }

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

/* Calls that a full disk fails. */
#define TAKES(inside, call, failed)         \
    do {                                    \
        if ((inside) && hit()) {            \
            if (fault == KILL) die();       \
            errno = ENOSPC;                 \
            return failed;                  \
        }                                   \
        return call;                        \
    } while (0)

/* Calls that a full disk lets through; a kill comes before them. */
#define GIVES(inside, call)                            \
    do {                                               \
        if ((inside) && hit() && fault == KILL) die(); \
        return call;                                   \
    } while (0)

static ssize_t half(int file, const void *bytes, size_t size) {
    ssize_t written = REAL(write)(file, bytes, size / 2);
    if (fault == KILL) die();
    (void)written;
    errno = ENOSPC;
    return -1;
}

ssize_t write(int file, const void *bytes, size_t size) {
    if (below_file(file) && hit()) return half(file, bytes, size);
    return REAL(write)(file, bytes, size);
}

ssize_t writev(int file, const struct iovec *parts, int number) {
    if (below_file(file) && hit()) return half(file, parts[0].iov_base, parts[0].iov_len);
    return REAL(writev)(file, parts, number);
}

static mode_t mode_of(int flags, va_list rest) { return flags & O_CREAT ? va_arg(rest, mode_t) : 0; }

#define OPEN(name)                                                                                     \
    int name(const char *path, int flags, ...) {                                                       \
        va_list rest;                                                                                  \
        va_start(rest, flags);                                                                         \
        mode_t mode = mode_of(flags, rest);                                                            \
        va_end(rest);                                                                                  \
        TAKES(flags & O_CREAT && below_path(AT_FDCWD, path), REAL(name)(path, flags, mode), -1);       \
    }
OPEN(open)
OPEN(open64)

#define OPENAT(name)                                                                                   \
    int name(int folder, const char *path, int flags, ...) {                                           \
        va_list rest;                                                                                  \
        va_start(rest, flags);                                                                         \
        mode_t mode = mode_of(flags, rest);                                                            \
        va_end(rest);                                                                                  \
        TAKES(flags & O_CREAT && below_path(folder, path), REAL(name)(folder, path, flags, mode), -1); \
    }
OPENAT(openat)
OPENAT(openat64)

FILE *fopen64(const char *path, const char *mode) {
    TAKES(strchr(mode, 'w') && below_path(AT_FDCWD, path), REAL(fopen64)(path, mode), NULL);
}
int ftruncate64(int file, off64_t size) { TAKES(below_file(file), REAL(ftruncate64)(file, size), -1); }
int posix_fallocate64(int file, off64_t from, off64_t size) {
    TAKES(below_file(file), REAL(posix_fallocate64)(file, from, size), ENOSPC);
}
int fsync(int file) { TAKES(below_file(file), REAL(fsync)(file), -1); }
int mkdir(const char *path, mode_t mode) { TAKES(below_path(AT_FDCWD, path), REAL(mkdir)(path, mode), -1); }
int rename(const char *from, const char *to) { GIVES(below_path(AT_FDCWD, from), REAL(rename)(from, to)); }
int unlink(const char *path) { GIVES(below_path(AT_FDCWD, path), REAL(unlink)(path)); }
int unlinkat(int folder, const char *path, int flags) {
    GIVES(below_path(folder, path), REAL(unlinkat)(folder, path, flags));
}
int rmdir(const char *path) { GIVES(below_path(AT_FDCWD, path), REAL(rmdir)(path)); }
