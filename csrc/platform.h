/* What only Linux has, and what other systems do instead. With TS_NO_LINUX Linux does as they
 * do: for tests. */
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
#include <ucontext.h> /* macOS has ucontext_t in <signal.h>, and refuses this one */
#endif

#if defined(__linux__) && !defined(TS_NO_LINUX)
#define TS_LINUX 1
#else
#define TS_LINUX 0
#endif

/* The clock of ts_condition_init. Where it cannot be chosen, setting the system's time lengthens
 * or shortens a wait. */
#if TS_LINUX
#define TS_CONDITION_CLOCK CLOCK_MONOTONIC
#else
#define TS_CONDITION_CLOCK CLOCK_REALTIME
#endif

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

/* Asks for huge pages; a refusal costs page faults only. */
static inline void ts_advise_huge(void *from, size_t bytes)
{
#if TS_LINUX && defined(MADV_HUGEPAGE)
    madvise(from, bytes, MADV_HUGEPAGE);
#else
    (void)from, (void)bytes;
#endif
}

/* Whole pages of a file map: reads them now, or asks the system to read them soon. */
static inline void ts_advise_read(void *from, size_t bytes)
{
#if TS_LINUX
    enum { POPULATE_READ = 22 }; /* Linux 5.14; headers of glibc before 2.35 lack its name */
    if (madvise(from, bytes, POPULATE_READ) == 0 || errno != EINVAL)
        return;
#endif
    madvise(from, bytes, MADV_WILLNEED);
}

/* The same pages: also out of the page cache where no other process maps them, or out of this map only. */
static inline void ts_advise_drop(void *from, size_t bytes)
{
#if TS_LINUX
    enum { PAGEOUT = 21 }; /* Linux 5.4; headers of glibc before 2.32 lack its name */
    if (madvise(from, bytes, PAGEOUT) == 0 || errno != EINVAL)
        return;
#endif
    madvise(from, bytes, MADV_DONTNEED);
}

/* Major faults of the calling thread so far; of the whole process where threads are not told apart. */
static inline int64_t ts_faults(void)
{
    struct rusage usage;
#if TS_LINUX
    int whose = RUSAGE_THREAD;
#else
    int whose = RUSAGE_SELF;
#endif
    return getrusage(whose, &usage) == 0 ? (int64_t)usage.ru_majflt : 0;
}

#endif
