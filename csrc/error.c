#include "error.h"

const char *ts_strerror(int code)
{
    switch (code) {
    case TS_OK: return "success";
    case TS_ERR_NOMEM: return "out of memory";
    case TS_ERR_IO: return "input/output error";
    case TS_ERR_SIZE: return "wrong size";
    case TS_ERR_FAULT: return "mapped file was truncated";
    case TS_ERR_NODE: return "edge refers to a node outside its graph";
    case TS_ERR_RANGE: return "value overflows the output type";
    case TS_ERR_BOUNDS: return "offset out of bounds";
    case TS_ERR_DTYPE: return "unsupported element type";
    default: return "unknown error";
    }
}
