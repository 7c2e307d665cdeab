#include "guard.h"

#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stddef.h>
#include <unistd.h>

#include "error.h"
#include "platform.h"

struct frame {
    sigjmp_buf at;
    struct frame *outer;
    const void *volatile fault;
};

/* Read by the handler: never allocated lazily, as thread-local data of a library else is. */
#define SIGNAL_SAFE_TLS static _Thread_local __attribute__((tls_model("initial-exec")))
SIGNAL_SAFE_TLS struct frame *volatile innermost;
static _Thread_local const void *last_fault;

/* The handlers that were there before ours, the newest last. An earlier one may hold ours as
 * the one before it and give the signal back, or may have been switched off without our
 * seeing it; the same signal then goes to the next older one, and in the end ends the process. */
#define MAX_EARLIER 16
static struct sigaction earlier[MAX_EARLIER];
static int num_earlier;
SIGNAL_SAFE_TLS int passed;               /* how many of them the last signal was passed by */
SIGNAL_SAFE_TLS int is_passing;
SIGNAL_SAFE_TLS const void *came_back_at; /* where the last one had a fault from which it returned */

/* The process that is installing, or 0: after fork() the lock of the parent means nothing. */
static pid_t installing;

static void pass_on(int number, siginfo_t *info, void *context)
{
    int is_sent = info->si_code <= 0; /* by kill() and the like; else the processor raised it */
    int again = is_sent ? is_passing : came_back_at != NULL && came_back_at == info->si_addr;
    passed = again ? passed + 1 : 0;
    int n = __atomic_load_n(&num_earlier, __ATOMIC_ACQUIRE) - 1 - passed;
    struct sigaction before = {.sa_handler = SIG_DFL};
    if (n >= 0)
        before = earlier[n];
    int is_function = (before.sa_flags & SA_SIGINFO) || (before.sa_handler != SIG_DFL && before.sa_handler != SIG_IGN);
    if (!is_function && is_sent && before.sa_handler == SIG_IGN)
        return;
    if (!is_function || (before.sa_flags & (int)SA_RESETHAND)) {
        struct sigaction standard = {.sa_handler = SIG_DFL};
        sigaction(number, &standard, NULL);
    }
    if (!is_function) {
        if (is_sent)
            raise(number);
        return; /* the instruction is tried again, and now ends the process */
    }
    sigset_t mask = before.sa_mask, kept;
    if (!(before.sa_flags & SA_NODEFER))
        sigaddset(&mask, number);
    pthread_sigmask(SIG_BLOCK, &mask, &kept);
    is_passing = 1;
    came_back_at = NULL;
    if (before.sa_flags & SA_SIGINFO)
        before.sa_sigaction(number, info, context);
    else
        before.sa_handler(number);
    is_passing = 0;
    came_back_at = is_sent ? NULL : info->si_addr;
    pthread_sigmask(SIG_SETMASK, &kept, NULL);
}

static void on_fault(int number, siginfo_t *info, void *context)
{
    struct frame *frame = innermost;
    if (frame != NULL && info->si_code == BUS_ADRERR) {
        frame->fault = info->si_addr;
        /* What a wrapper around this handler (a sanitizer's) has blocked is not left so. */
        pthread_sigmask(SIG_SETMASK, &((const ucontext_t *)context)->uc_sigmask, NULL);
        siglongjmp(frame->at, 1);
    }
    pass_on(number, info, context);
}

static int is_ours(const struct sigaction *action)
{
    return (action->sa_flags & SA_SIGINFO) && action->sa_sigaction == on_fault;
}

static void install(void)
{
    struct sigaction found;
    if (sigaction(SIGBUS, NULL, &found) != 0 || is_ours(&found))
        return;
    pid_t self = getpid(), holder = 0;
    while (!__atomic_compare_exchange_n(&installing, &holder, self, 0, __ATOMIC_ACQUIRE, __ATOMIC_RELAXED))
        if (holder == self)
            holder = 0; /* a thread of this process has it: until it is free */
    if (sigaction(SIGBUS, NULL, &found) == 0 && !is_ours(&found)) {
        int n = num_earlier;
        if (n == MAX_EARLIER || (n > 0 && earlier[n - 1].sa_sigaction == found.sa_sigaction))
            n--; /* the newest one's place: it is the same, or there is no other */
        earlier[n] = found;
        __atomic_store_n(&num_earlier, n + 1, __ATOMIC_RELEASE);
        /* No mask, and not blocked while it runs, so that leaving it by a jump leaves nothing to restore. */
        struct sigaction ours = {.sa_sigaction = on_fault, .sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER};
        sigemptyset(&ours.sa_mask);
        sigaction(SIGBUS, &ours, NULL);
    }
    __atomic_store_n(&installing, 0, __ATOMIC_RELEASE);
}

static int run_guarded(int (*work)(void *context), void *context, const void **fault, int is_again)
{
    struct frame frame = {.outer = innermost};
    int ret;
    if (!is_again)
        install();
    if (sigsetjmp(frame.at, 0) == 0) {
        innermost = &frame;
        ret = work(context);
    } else {
        ret = TS_ERR_FAULT;
        *fault = frame.fault;
    }
    innermost = frame.outer;
    return ret;
}

static ts_guard_runner *runner = run_guarded;

ts_guard_runner *ts_guard_own(void) { return run_guarded; }
void ts_guard_share(ts_guard_runner *shared) { runner = shared; }

int ts_sigbus_guard(int (*work)(void *context), void *context)
{
    return runner(work, context, &last_fault, 0);
}

int ts_guard_run_again(int (*work)(void *context), void *context)
{
    return runner(work, context, &last_fault, 1);
}

const void *ts_guard_fault(void) { return last_fault; }
void ts_guard_set_fault(const void *address) { last_fault = address; }
