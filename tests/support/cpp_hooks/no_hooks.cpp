// A library of hooks with none in it.
#include <commhook/autograd_hook.h>
