// A library that includes the header of hooks, but has no hooks.
#include <commhook/autograd_hook.h>
