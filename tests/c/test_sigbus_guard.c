#include <setjmp.h>
#include <signal.h>
#include <sys/wait.h>

#include "sigbus_guard.h"
#include "thread_pool.h"
#include "test_core.h"

static int read_byte(void *context)
{
    return *(volatile unsigned char *)context;
}

static int read_nested(void *context)
{
    int ret = ts_sigbus_guard(read_byte, context);
    return ret == TS_ERR_FAULT ? read_byte((unsigned char *)context - 2 * 4096) : ret;
}

static void read_in_thread(void *context)
{
    unsigned char **address = context;
    int is_fault = ts_sigbus_guard(read_byte, *address) == TS_ERR_FAULT && ts_sigbus_fault() == *address;
    *address = is_fault ? NULL : *address;
}

static void test_guard(void)
{
    struct ts_map map;
    unsigned char *base = map_truncated_file(&map, 5000), out[4 * 4096];
    CHECK(ts_sigbus_guard(read_byte, base) == 0x3c && ts_sigbus_guard(read_byte, base + 5000) == 0);
    for (int i = 0; i < 3; i++)
        CHECK(ts_sigbus_guard(read_byte, base + 8192 + i) == TS_ERR_FAULT && ts_sigbus_fault() == base + 8192 + i);
    /* A fault in an inner guard does not end the outer one, which still catches its own. */
    CHECK(ts_sigbus_guard(read_nested, base + 8192) == 0x3c);
    CHECK(ts_sigbus_guard(read_nested, base + 4 * 4096 - 1) == 0);
    /* A copy is valid only if nothing was cut off, even after its range. */
    CHECK(ts_map_copy(&map, 0, 10, out) == TS_ERR_FAULT && ts_sigbus_fault() == map.tail);
    CHECK(ts_map_copy(&map, 8192, 10, out) == TS_ERR_FAULT && ts_map_copy(&map, 8192, 0, out) == TS_OK);
    struct ts_thread_pool *pool = ts_thread_pool_start(2);
    struct ts_job jobs[20] = {{0}};
    unsigned char *addresses[20];
    for (int k = 0; k < 20; k++) {
        addresses[k] = base + (k % 2 ? 8192 + k : k);
        jobs[k].run = read_in_thread;
        jobs[k].context = &addresses[k];
        ts_thread_pool_submit(pool, &jobs[k]);
    }
    for (int k = 0; k < 20; k++) {
        while (!ts_thread_pool_wait(pool, &jobs[k], 1000))
            ;
        CHECK((addresses[k] == NULL) == k % 2);
    }
    ts_thread_pool_stop(pool);
    ts_map_close(&map);
    base = map_truncated_file(&map, 4 * 4096 - 1); /* cuts off the recorded byte only */
    CHECK(ts_sigbus_guard(read_byte, base + 4 * 4096 - 1) == 0 && !ts_map_is_intact(&map));
    ts_map_close(&map);
}

static unsigned char *fault_address;
static volatile sig_atomic_t num_calls;
static sigjmp_buf jump_target;

/* Write the counts of a child process for `make coverage-c`. */
#if defined(TS_COVERAGE)
extern void __gcov_dump(void);
static void write_counts(void) { __gcov_dump(); }
#else
static void write_counts(void) {}
#endif

static void count_and_exit(int number)
{
    (void)number;
    num_calls++;
    write_counts();
    _exit(40 + num_calls);
}

static void jump_out(int number, siginfo_t *info, void *context)
{
    (void)number, (void)context;
    CHECK(info->si_addr == fault_address);
    num_calls++;
    siglongjmp(jump_target, 1);
}

static void count_and_return(int number)
{
    (void)number;
    num_calls++;
}

static struct sigaction replaced_action;
static void restore_and_raise(int number)
{
    num_calls++;
    sigaction(number, &replaced_action, NULL);
    raise(number);
}

/* Return the exit status of a child that touches a missing page outside a guard, after it installed
 * handlers in one of several ways. */
static int child_status(int way, unsigned char *page)
{
    pid_t child = fork();
    if (child != 0) {
        int status = 0;
        CHECK(waitpid(child, &status, 0) == child);
        return status;
    }
    fault_address = page;
    struct sigaction other = {.sa_handler = SIG_DFL};
    sigaction(SIGBUS, &other, NULL); /* also removes the sanitizer's handler */
    if (way == 1 || way == 2)
        other.sa_handler = count_and_exit;
    if (way == 3 || way == 4) {
        other.sa_sigaction = jump_out;
        other.sa_flags = SA_SIGINFO | SA_NODEFER;
    }
    if (way == 5)
        other.sa_handler = count_and_return;
    if (way == 6) {
        other.sa_handler = restore_and_raise;
        other.sa_flags = SA_NODEFER;
    }
    if (way == 7)
        other.sa_handler = SIG_IGN;
    if (way != 1 && way != 3) /* install this handler before the other one as well as after it */
        CHECK(ts_sigbus_guard(read_byte, page) == TS_ERR_FAULT);
    sigaction(SIGBUS, &other, &replaced_action);
    CHECK(ts_sigbus_guard(read_byte, page) == TS_ERR_FAULT && num_calls == 0);
    if (way == 3 || way == 4)
        for (volatile int i = 0; i < 3; i++)
            if (sigsetjmp(jump_target, 1) == 0)
                read_byte(page);
    if (num_calls == 3) {
        write_counts();
        _exit(43);
    }
    read_byte(page);
    _exit(1);
}

static void test_other_handlers(void)
{
    struct ts_map map;
    unsigned char *page = map_truncated_file(&map, 0) + 7;
    for (int way = 0; way < 8; way++) {
#if defined(__SANITIZE_THREAD__)
        if (way == 6) /* the thread sanitizer delays signals that a handler raises */
            continue;
#endif
        int status = child_status(way, page);
        if (way == 1 || way == 2)
            CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 41);
        else if (way == 3 || way == 4)
            CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 43);
        else
            CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGBUS);
    }
    ts_map_close(&map);
}

void test_sigbus_guard(void)
{
    test_guard();
    test_other_handlers();
}
