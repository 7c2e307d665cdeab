/* Error codes of the C core. Every fallible function returns 0 or one of
 * these negative codes; C never formats a message, Python adds the names. */
#ifndef TS_ERROR_H
#define TS_ERROR_H

enum ts_error {
    TS_OK = 0,
    TS_ERR_NOMEM = -1,     /* an allocation failed */
    TS_ERR_IO = -2,        /* a system call failed; errno is kept by the caller */
    TS_ERR_SIZE = -3,      /* a file or buffer has another size than it must have */
    TS_ERR_CHECKSUM = -4,  /* a stored checksum does not match its bytes */
    TS_ERR_LAYOUT = -5,    /* inner chunks are not one contiguous slab in order */
    TS_ERR_RANGE = -6,     /* a value does not fit the output type */
    TS_ERR_BOUNDS = -7,    /* an offset or count points outside its buffer */
    TS_ERR_DTYPE = -8,     /* an element type this function does not handle */
    TS_ERR_FAULT = -9,     /* a mapped file was cut short while it was read; see guard.h */
    TS_ERR_NODE = -10,     /* an edge joins nodes that its graph does not have */
    TS_ERR_LAST = -11
};

/* A static, never NULL, English description of `code`. */
const char *ts_strerror(int code);

#endif
