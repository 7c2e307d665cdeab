/**
 * Error codes of the C core.
 *
 * Functions that can fail return TS_OK or a negative code. The C core formats no messages and
 * prints nothing: the Python layer adds file and field names. ts_strerror() is thread safe.
 */
#ifndef TS_ERROR_H
#define TS_ERROR_H

/** Marks functions whose error code must not be ignored. */
#define TS_WARN_UNUSED __attribute__((warn_unused_result))

enum ts_error {
    TS_OK = 0,

    /* Resources of the system */
    TS_ERR_NOMEM = -1, /* an allocation failed */
    TS_ERR_IO = -2,    /* a system call failed; errno holds the reason */

    /* Files that are damaged, or turn out to be while they are read */
    TS_ERR_SIZE = -3,  /* the size of a file or buffer differs from the expected size */
    TS_ERR_FAULT = -4, /* a mapped file was truncated; see sigbus_guard.h */
    TS_ERR_NODE = -5,  /* an edge refers to a node outside its graph */

    /* Arguments and values */
    TS_ERR_RANGE = -6,  /* a finite value overflows the output type */
    TS_ERR_BOUNDS = -7, /* an offset or a count lies outside its buffer */
    TS_ERR_DTYPE = -8,  /* the function does not support this element type */

    TS_ERR_LAST = -9 /* one below the last code */
};

/**
 * Return the English description of an error code.
 *
 * @param code  TS_OK or a TS_ERR_ code
 * @return a static string, never NULL
 */
const char *ts_strerror(int code);

#endif
