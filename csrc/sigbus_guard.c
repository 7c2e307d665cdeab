#include "sigbus_guard.h"

#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stddef.h>
#include <unistd.h>

#include "error.h"
#include "platform.h"

struct frame {
    sigjmp_buf target;
    struct frame *outer;
    const void *volatile fault;
};

/* Thread-local data that the signal handler reads. The default TLS model of a shared library allocates
 * it lazily, which is not async-signal-safe. */
#define SIGNAL_SAFE_TLS static _Thread_local __attribute__((tls_model("initial-exec")))
SIGNAL_SAFE_TLS struct frame *volatile innermost;
static _Thread_local const void *last_fault;

/* Handlers that were installed before this one, the newest last. An earlier handler may have recorded
 * this one as its predecessor and return the signal to it, or may have been disabled unnoticed. The
 * same signal then goes to the next older handler, and finally ends the process. */
#define MAX_PREVIOUS 16
static struct sigaction previous[MAX_PREVIOUS];
static int num_previous;
SIGNAL_SAFE_TLS int num_skipped;          /* handlers that did not resolve the current signal */
SIGNAL_SAFE_TLS int is_forwarding;
SIGNAL_SAFE_TLS const void *returned_from; /* address of the fault from which the last handler returned */

/* Spin lock of install(): the process that holds it, or 0. A child of fork() ignores the lock of its parent. */
static pid_t lock_owner;

static void forward_signal(int number, siginfo_t *info, void *context)
{
    int is_sent = info->si_code <= 0; /* sent by kill() or the like, not raised by the processor */
    int is_repeated = is_sent ? is_forwarding : returned_from != NULL && returned_from == info->si_addr;
    num_skipped = is_repeated ? num_skipped + 1 : 0;
    int n = __atomic_load_n(&num_previous, __ATOMIC_ACQUIRE) - 1 - num_skipped;
    struct sigaction handler = {.sa_handler = SIG_DFL};
    if (n >= 0)
        handler = previous[n];
    int is_function = (handler.sa_flags & SA_SIGINFO) || (handler.sa_handler != SIG_DFL && handler.sa_handler != SIG_IGN);
    if (!is_function && is_sent && handler.sa_handler == SIG_IGN)
        return;
    if (!is_function || (handler.sa_flags & (int)SA_RESETHAND)) {
        struct sigaction terminate = {.sa_handler = SIG_DFL};
        sigaction(number, &terminate, NULL);
    }
    if (!is_function) {
        if (is_sent)
            raise(number);
        return; /* the instruction runs again, and its fault now ends the process */
    }
    sigset_t mask = handler.sa_mask, saved;
    if (!(handler.sa_flags & SA_NODEFER))
        sigaddset(&mask, number);
    pthread_sigmask(SIG_BLOCK, &mask, &saved);
    is_forwarding = 1;
    returned_from = NULL;
    if (handler.sa_flags & SA_SIGINFO)
        handler.sa_sigaction(number, info, context);
    else
        handler.sa_handler(number);
    is_forwarding = 0;
    returned_from = is_sent ? NULL : info->si_addr;
    pthread_sigmask(SIG_SETMASK, &saved, NULL);
}

static void on_fault(int number, siginfo_t *info, void *context)
{
    struct frame *frame = innermost;
    if (frame != NULL && info->si_code == BUS_ADRERR) {
        frame->fault = info->si_addr;
        /* Restore the mask: a wrapper around this handler, such as a sanitizer's, may have blocked signals. */
        pthread_sigmask(SIG_SETMASK, &((const ucontext_t *)context)->uc_sigmask, NULL);
        siglongjmp(frame->target, 1);
    }
    forward_signal(number, info, context);
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
    pid_t self = getpid(), owner = 0;
    while (!__atomic_compare_exchange_n(&lock_owner, &owner, self, 0, __ATOMIC_ACQUIRE, __ATOMIC_RELAXED))
        if (owner == self)
            owner = 0; /* another thread of this process holds the lock: retry until it is free */
    if (sigaction(SIGBUS, NULL, &found) == 0 && !is_ours(&found)) {
        int n = num_previous;
        if (n == MAX_PREVIOUS || (n > 0 && previous[n - 1].sa_sigaction == found.sa_sigaction))
            n--; /* replace the newest one: it is the same function, or the list is full */
        previous[n] = found;
        __atomic_store_n(&num_previous, n + 1, __ATOMIC_RELEASE);
        /* No mask, and SA_NODEFER: a jump out of the handler then leaves no signal blocked. */
        struct sigaction ours = {.sa_sigaction = on_fault, .sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER};
        sigemptyset(&ours.sa_mask);
        sigaction(SIGBUS, &ours, NULL);
    }
    __atomic_store_n(&lock_owner, 0, __ATOMIC_RELEASE);
}

int ts_sigbus_guard(int (*work)(void *context), void *context)
{
    install();
    return ts_sigbus_guard_again(work, context);
}

int ts_sigbus_guard_again(int (*work)(void *context), void *context)
{
    struct frame frame = {.outer = innermost};
    int ret;
    if (sigsetjmp(frame.target, 0) == 0) {
        innermost = &frame;
        ret = work(context);
    } else {
        ret = TS_ERR_FAULT;
        last_fault = frame.fault;
    }
    innermost = frame.outer;
    return ret;
}

const void *ts_sigbus_fault(void) { return last_fault; }
void ts_sigbus_set_fault(const void *address) { last_fault = address; }
