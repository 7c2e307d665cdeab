/* An LD_PRELOAD library that injects faults into file system calls.
 *
 * It counts the calls that modify files under a prefix and performs the armed action at call number `at`.
 * fsync is counted and succeeds without waiting for a disk: a killed process loses no written data, and
 * tests/fault_injection/disk_model.py covers crashes of the machine.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

enum { PASS, KILL, FAIL, SHORT, FULL };
enum { WRITE, ALLOCATE, OTHER };

static char prefix[PATH_MAX];
static size_t prefix_length;
static int armed, action, fault, log_fd = -1;
static long at;
static atomic_long calls;

/* Count the calls under `path` from now on. FAIL: call `at` fails with `error`, once. FULL: from call `at`
 * on, every call that allocates space fails with ENOSPC. log >= 0: write one line per call to it. */
void faults_arm(const char *path, long call, int what, int error, int log)
{
    snprintf(prefix, sizeof prefix, "%s", path);
    prefix_length = strlen(prefix);
    at = call, action = what, fault = error, log_fd = log;
    atomic_store(&calls, 0);
    armed = 1;
}

long faults_disarm(void)
{
    armed = 0;
    return atomic_load(&calls);
}

static int inside(const char *path)
{
    return strncmp(path, prefix, prefix_length) == 0 && (path[prefix_length] == '/' || path[prefix_length] == 0);
}

static int path_of(int fd, char *out)
{
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = readlink(link, out, PATH_MAX - 1);
    out[n < 0 ? 0 : n] = 0;
    return n > 0;
}

/* Return 0 to continue, -1 to fail with errno set, 1 for a short write. */
static int inject(int kind, const char *name, const char *path)
{
    if (!inside(path))
        return 0;
    long n = atomic_fetch_add(&calls, 1) + 1;
    if (log_fd >= 0)
        dprintf(log_fd, "%s %s\n", name, path + prefix_length);
    if (action == FULL && n >= at && kind != OTHER)
        return errno = ENOSPC, -1;
    if (n != at)
        return 0;
    if (action == KILL && kind != WRITE)
        kill(getpid(), SIGKILL);
    if (action == FAIL)
        return errno = fault, -1;
    return kind == WRITE && (action == KILL || action == SHORT);
}

static int inject_fd(int kind, const char *name, int fd)
{
    char path[PATH_MAX];
    return armed && path_of(fd, path) ? inject(kind, name, path) : 0;
}

static int inject_at(int kind, const char *name, int folder, const char *path)
{
    char full[PATH_MAX * 2];
    if (!armed)
        return 0;
    if (path[0] == '/' || folder == AT_FDCWD)
        return inject(kind, name, path);
    if (!path_of(folder, full))
        return 0;
    strcat(strcat(full, "/"), path);
    return inject(kind, name, full);
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

#define WRITER(name, arguments, full, half)                                                                            \
    ssize_t name arguments                                                                                             \
    {                                                                                                                  \
        int hit = inject_fd(WRITE, #name, fd);                                                                         \
        if (hit < 0)                                                                                                   \
            return -1;                                                                                                 \
        ssize_t done = hit ? half : full;                                                                              \
        if (hit && action == KILL)                                                                                     \
            kill(getpid(), SIGKILL);                                                                                   \
        return done;                                                                                                   \
    }
WRITER(write, (int fd, const void *data, size_t n), REAL(write)(fd, data, n), REAL(write)(fd, data, (n + 1) / 2))
WRITER(pwrite, (int fd, const void *data, size_t n, off_t o), REAL(pwrite)(fd, data, n, o),
       REAL(pwrite)(fd, data, (n + 1) / 2, o))
WRITER(pwrite64, (int fd, const void *data, size_t n, off64_t o), REAL(pwrite64)(fd, data, n, o),
       REAL(pwrite64)(fd, data, (n + 1) / 2, o))
WRITER(writev, (int fd, const struct iovec *v, int n), REAL(writev)(fd, v, n), REAL(writev)(fd, v, (n + 1) / 2))
WRITER(pwritev, (int fd, const struct iovec *v, int n, off_t o), REAL(pwritev)(fd, v, n, o),
       REAL(pwrite)(fd, v->iov_base, (v->iov_len + 1) / 2, o))
WRITER(pwritev64, (int fd, const struct iovec *v, int n, off64_t o), REAL(pwritev64)(fd, v, n, o),
       REAL(pwrite64)(fd, v->iov_base, (v->iov_len + 1) / 2, o))

#define ON_FD(name, arguments, kind, call)                                                                             \
    int name arguments { return inject_fd(kind, #name, fd) ? -1 : call; }
ON_FD(fsync, (int fd), OTHER, armed ? 0 : REAL(fsync)(fd))
ON_FD(fdatasync, (int fd), OTHER, armed ? 0 : REAL(fdatasync)(fd))
ON_FD(fchmod, (int fd, mode_t mode), OTHER, REAL(fchmod)(fd, mode))
ON_FD(ftruncate, (int fd, off_t size), OTHER, REAL(ftruncate)(fd, size))
ON_FD(ftruncate64, (int fd, off64_t size), OTHER, REAL(ftruncate64)(fd, size))

#define ON_PATH(name, arguments, kind, folder, path, call)                                                             \
    int name arguments { return inject_at(kind, #name, folder, path) ? -1 : call; }
ON_PATH(rename, (const char *a, const char *b), OTHER, AT_FDCWD, b, REAL(rename)(a, b))
ON_PATH(renameat, (int f, const char *a, int g, const char *b), OTHER, g, b, REAL(renameat)(f, a, g, b))
ON_PATH(renameat2, (int f, const char *a, int g, const char *b, unsigned int flags), OTHER, g, b,
        REAL(renameat2)(f, a, g, b, flags))
ON_PATH(link, (const char *a, const char *b), OTHER, AT_FDCWD, b, REAL(link)(a, b))
ON_PATH(linkat, (int f, const char *a, int g, const char *b, int flags), OTHER, g, b, REAL(linkat)(f, a, g, b, flags))
ON_PATH(mkdir, (const char *a, mode_t mode), ALLOCATE, AT_FDCWD, a, REAL(mkdir)(a, mode))
ON_PATH(mkdirat, (int f, const char *a, mode_t mode), ALLOCATE, f, a, REAL(mkdirat)(f, a, mode))
ON_PATH(unlink, (const char *a), OTHER, AT_FDCWD, a, REAL(unlink)(a))
ON_PATH(unlinkat, (int f, const char *a, int flags), OTHER, f, a, REAL(unlinkat)(f, a, flags))
ON_PATH(rmdir, (const char *a), OTHER, AT_FDCWD, a, REAL(rmdir)(a))
ON_PATH(truncate, (const char *a, off_t size), OTHER, AT_FDCWD, a, REAL(truncate)(a, size))
ON_PATH(truncate64, (const char *a, off64_t size), OTHER, AT_FDCWD, a, REAL(truncate64)(a, size))
ON_PATH(chmod, (const char *a, mode_t mode), OTHER, AT_FDCWD, a, REAL(chmod)(a, mode))
ON_PATH(fchmodat, (int f, const char *a, mode_t mode, int flags), OTHER, f, a, REAL(fchmodat)(f, a, mode, flags))

/* Calls that open and may create a file. */
#define OPENER(name, first, folder, pass)                                                                              \
    int name(first const char *path, int flags, ...)                                                                   \
    {                                                                                                                  \
        va_list list;                                                                                                  \
        va_start(list, flags);                                                                                         \
        mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(list, mode_t) : 0;                                        \
        va_end(list);                                                                                                  \
        if (flags & O_CREAT && inject_at(ALLOCATE, #name, folder, path))                                               \
            return -1;                                                                                                 \
        return REAL(name)(pass path, flags, mode);                                                                     \
    }
#define COMMA ,
OPENER(open, , AT_FDCWD, )
OPENER(open64, , AT_FDCWD, )
OPENER(openat, int f COMMA, f, f COMMA)
OPENER(openat64, int f COMMA, f, f COMMA)
