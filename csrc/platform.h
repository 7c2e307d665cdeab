/**
 * Linux system calls and their substitutes on other systems. With TS_NO_LINUX, Linux uses the
 * substitutes too, for tests.
 */
#ifndef TS_PLATFORM_H
#define TS_PLATFORM_H

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <time.h>

#if defined(__linux__)
#include <ucontext.h> /* macOS declares ucontext_t in <signal.h> and rejects this header */
#endif

#if defined(__linux__) && !defined(TS_NO_LINUX)
#define TS_LINUX 1
#else
#define TS_LINUX 0
#endif

#if defined(__aarch64__) && TS_LINUX
#include <sys/auxv.h>
#elif defined(__aarch64__) && defined(__APPLE__)
#include <sys/sysctl.h>
#endif

/* The clock of ts_condition_init(). With CLOCK_REALTIME, setting the system time lengthens or
 * shortens a wait. */
#if TS_LINUX
#define TS_CONDITION_CLOCK CLOCK_MONOTONIC
#else
#define TS_CONDITION_CLOCK CLOCK_REALTIME
#endif

/** Initialize a condition variable that waits by TS_CONDITION_CLOCK. Returns 0 or an errno value. */
static inline int ts_condition_init(pthread_cond_t *condition)
{
#if TS_LINUX
    pthread_condattr_t attributes;
    int ret = pthread_condattr_init(&attributes);
    if (ret != 0)
        return ret;
    pthread_condattr_setclock(&attributes, TS_CONDITION_CLOCK);
    ret = pthread_cond_init(condition, &attributes);
    pthread_condattr_destroy(&attributes);
    return ret;
#else
    return pthread_cond_init(condition, NULL);
#endif
}

/** Request huge pages. Best effort: failure costs extra page faults. */
static inline void ts_advise_huge(void *begin, size_t bytes)
{
#if TS_LINUX && defined(MADV_HUGEPAGE)
    madvise(begin, bytes, MADV_HUGEPAGE);
#else
    (void)begin, (void)bytes;
#endif
}

/** Read whole pages of a file mapping now, or else ask the system to read them soon. */
static inline void ts_advise_prefetch(void *begin, size_t bytes)
{
#if TS_LINUX
    enum { POPULATE_READ = 22 }; /* Linux 5.14; headers of glibc before 2.35 lack its name */
    if (madvise(begin, bytes, POPULATE_READ) == 0 || errno != EINVAL)
        return;
#endif
    madvise(begin, bytes, MADV_WILLNEED);
}

/** Drop whole pages from the page cache if no other process maps them, or else from this mapping. */
static inline void ts_advise_evict(void *begin, size_t bytes)
{
#if TS_LINUX
    enum { PAGEOUT = 21 }; /* Linux 5.4; headers of glibc before 2.32 lack its name */
    if (madvise(begin, bytes, PAGEOUT) == 0 || errno != EINVAL)
        return;
#endif
    madvise(begin, bytes, MADV_DONTNEED);
}

/** Return the major page faults (those that waited for a disk) of the thread, or else of the process. */
static inline int64_t ts_major_faults(void)
{
    struct rusage usage;
#if TS_LINUX
    int scope = RUSAGE_THREAD;
#else
    int scope = RUSAGE_SELF;
#endif
    return getrusage(scope, &usage) == 0 ? (int64_t)usage.ru_majflt : 0;
}

#if defined(__aarch64__)
/** Return 1 if the processor is known to have the CRC32 instructions. */
static inline int ts_has_crc32(void)
{
#if TS_LINUX
    return (getauxval(AT_HWCAP) & HWCAP_CRC32) != 0;
#elif defined(__APPLE__)
    int value = 0;
    size_t size = sizeof value;
    return sysctlbyname("hw.optional.armv8_crc32", &value, &size, NULL, 0) == 0 && value != 0;
#else
    return 0;
#endif
}
#endif

#endif
